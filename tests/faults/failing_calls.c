/* Stands between a program and its C library, and lets chosen calls below a folder fail, end short, lose their answer, or
   be the last thing that the process does. Loaded by LD_PRELOAD; armed by the program itself, through ctypes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAIL, PART, AFTER, NOTHING, DIE, DIE_HALFWAY };

static char chosen[32], below[4096];
static int armed, first, times_, error_, how_, hits_;
static char log_[1 << 16];
static unsigned logged;

void arm(const char *call, const char *folder, int nth, int times, int error, int how) {
    strncpy(chosen, call, sizeof chosen - 1);
    strncpy(below, folder, sizeof below - 1);
    first = nth; times_ = times; error_ = error; how_ = how;
    hits_ = 0; logged = 0; log_[0] = 0;
    __atomic_store_n(&armed, 1, __ATOMIC_SEQ_CST);
}
int disarm(void) { __atomic_store_n(&armed, 0, __ATOMIC_SEQ_CST); return hits_; }
const char *calls(void) { return log_; }

static __attribute__((noreturn)) void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause(); /* another thread may be the one that the signal meets first */
}

static int met;
static int chooses(const char *call, const char *path) {
    if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST) || !path || strncmp(path, below, strlen(below))) return 0;
    if (!strcmp(call, chosen) || !strcmp("*", chosen)) {
        static int lock;
        while (__atomic_exchange_n(&lock, 1, __ATOMIC_SEQ_CST)) {}
        if (!hits_ && logged == 0) met = 0;
        unsigned length = strlen(call);
        if (logged + length + 2 < sizeof log_) {
            memcpy(log_ + logged, call, length); log_[logged + length] = ' '; logged += length + 1; log_[logged] = 0;
        }
        met++;
        int yes = first > 0 && met >= first && met < first + times_;
        hits_ += yes;
        __atomic_store_n(&lock, 0, __ATOMIC_SEQ_CST);
        if (yes && how_ == DIE) die();
        return yes;
    }
    return 0;
}
static int chooses_fd(const char *call, int fd) {
    if (!__atomic_load_n(&armed, __ATOMIC_SEQ_CST)) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int saved = errno;
    ssize_t n = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (n < 0) return 0;
    path[n] = 0;
    return chooses(call, path);
}

#define NEXT(name) ({ static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })
#define FAILING { errno = error_; return -1; }
#define PLAIN(type, call, name, parameters, arguments, choice)                  \
    type name parameters {                                                      \
        if (!(choice)) return NEXT(name) arguments;                             \
        if (how_ >= AFTER) { NEXT(name) arguments; }                            \
        if (how_ == DIE_HALFWAY) die();                                         \
        FAILING                                                                 \
    }
PLAIN(int, "mkdir", mkdir, (const char *p, mode_t m), (p, m), chooses("mkdir", p))
PLAIN(int, "rmdir", rmdir, (const char *p), (p), chooses("rmdir", p))
PLAIN(int, "unlink", unlink, (const char *p), (p), chooses("unlink", p))
PLAIN(int, "symlink", symlink, (const char *p, const char *q), (p, q), chooses("symlink", q))
PLAIN(int, "rename", rename, (const char *p, const char *q), (p, q), chooses("rename", p))
PLAIN(int, "link", link, (const char *p, const char *q), (p, q), chooses("link", p))
PLAIN(int, "link", linkat, (int d, const char *p, int e, const char *q, int f), (d, p, e, q, f), chooses("link", p))
PLAIN(int, "unlink", unlinkat, (int d, const char *p, int f), (d, p, f),
      *p == '/' ? chooses("unlink", p) : chooses_fd("unlink", d))
PLAIN(int, "utime", utimensat, (int d, const char *p, const struct timespec t[2], int f), (d, p, t, f),
      chooses("utime", p))
PLAIN(int, "ftruncate", ftruncate64, (int fd, off64_t n), (fd, n), chooses_fd("ftruncate", fd))
PLAIN(int, "fsync", fsync, (int fd), (fd), chooses_fd("fsync", fd))
PLAIN(int, "flock", flock, (int fd, int how), (fd, how), chooses_fd("flock", fd))
PLAIN(int, "stat", stat64, (const char *p, struct stat64 *s), (p, s), chooses("stat", p))
PLAIN(int, "stat", lstat64, (const char *p, struct stat64 *s), (p, s), chooses("stat", p))

int close(int fd) { /* it is closed, whatever is said of it */
    int chosen_ = chooses_fd("close", fd), done = NEXT(close)(fd);
    if (!chosen_) return done;
    if (how_ == DIE_HALFWAY) die();
    FAILING
}
static int opening(const char *p, int flags) {
    return chooses(flags & O_CREAT ? "create" : flags & O_DIRECTORY ? "open_folder" : "open", p);
}
int open64(const char *p, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (opening(p, flags)) {
        if (how_ == DIE_HALFWAY) { NEXT(open64)(p, flags, mode); die(); }
        FAILING
    }
    return NEXT(open64)(p, flags, mode);
}
DIR *opendir(const char *p) {
    if (chooses("opendir", p)) { errno = error_; return NULL; }
    return NEXT(opendir)(p);
}
#define BYTES(call, name, parameters, arguments, part)                          \
    ssize_t name parameters {                                                   \
        if (!chooses_fd(call, fd)) return NEXT(name) arguments;                 \
        if (how_ == NOTHING) return 0;                                          \
        if (how_ == PART) { part; return NEXT(name) arguments; }                \
        if (how_ == DIE_HALFWAY) { part; NEXT(name) arguments; die(); }         \
        if (how_ == AFTER) { NEXT(name) arguments; }                            \
        FAILING                                                                 \
    }
BYTES("read", read, (int fd, void *b, size_t n), (fd, b, n), n = (n + 1) / 2)
BYTES("write", write, (int fd, const void *b, size_t n), (fd, b, n), n = (n + 1) / 2)
/* of several buffers the first one, and half of that; whole pages where it is more than one */
static int halved(const struct iovec *v, struct iovec *half) {
    *half = *v;
    half->iov_len = v->iov_len > 8192 ? v->iov_len / 2 / 4096 * 4096 : (v->iov_len + 1) / 2;
    return 1;
}
BYTES("pwritev", pwritev64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o),
      struct iovec half; n = halved(v, &half); v = &half)
BYTES("preadv", preadv64, (int fd, const struct iovec *v, int n, off64_t o), (fd, v, n, o),
      struct iovec half; n = halved(v, &half); v = &half)
/* with flags, it only asks whether it had to wait */
BYTES(f ? "asking" : "preadv", preadv64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f),
      struct iovec half; n = halved(v, &half); v = &half)
BYTES("pwritev", pwritev64v2, (int fd, const struct iovec *v, int n, off64_t o, int f), (fd, v, n, o, f),
      struct iovec half; n = halved(v, &half); v = &half)
