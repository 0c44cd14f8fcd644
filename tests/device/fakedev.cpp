// An accelerator that is not there: torch's PrivateUse1 backend over host memory, to show what code for others forgets.
//
// - Its addresses cannot be read by the host: whoever takes a device's tensor for host memory crashes.
// - Copies with `non_blocking` from or to pinned memory wait in their stream until it is synchronized, or a stream that
//   waits for it: whoever forgets that reads what was there before.
// - Memory that is freed is reused at once, with other bytes, though a copy from it may still wait in another stream than
//   the current one; `record_stream` prevents that. A copy that waits does not hold the device's memory.
// - A copy between host and device whose elements do not lie alike on both sides takes memory of the device.
// - Host memory can be pinned where it is (`pin`), and must not be unpinned while a copy uses it.
// - It counts copies and bytes, and can refuse an allocation.
//
// All else runs on the CPU (`cpu_fallback`), in the order in which it is called.

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
constexpr DeviceIndex kDevices = 2;
constexpr uintptr_t kFar = uintptr_t(1) << 62;  // no address of the host has this bit

// Never destroyed: tensors may outlive whatever ends with the process.
auto& lock = *new std::recursive_mutex;
auto& done_work = *new std::vector<std::function<void()>>;
int depth = 0;

// Work that was done is destroyed once the lock is free: to let go of host memory may take the interpreter, which may wait
// for the lock.
struct Guard {
    explicit Guard(std::recursive_mutex& held) {
        held.lock();
        ++depth;
    }
    ~Guard() {
        std::vector<std::function<void()>> dead;
        if (--depth == 0) dead.swap(done_work);
        lock.unlock();
    }
};
auto& counts = *new std::map<std::string, int64_t>;
bool refuse_pin = false;
int64_t refused = 0;  // this allocation from now on fails; 0: none
thread_local bool falling_back = false;
thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[kDevices] = {};

// Streams: work waits until it is asked for

struct Queue {
    std::deque<std::function<void()>> waiting;
    uint64_t given = 0, done = 0;
    int64_t copies = 0;  // of those that wait; the others only wait for another stream

    void give(std::function<void()> work) {
        waiting.push_back(std::move(work));
        ++given;
    }
    void run(uint64_t until) {
        while (done < until) {
            auto work = std::move(waiting.front());
            waiting.pop_front();
            ++done;
            work();
            done_work.push_back(std::move(work));
        }
    }
};

struct Mark {
    Queue* queue;
    uint64_t at;
};

auto& queues = *new std::map<std::pair<DeviceIndex, c10::StreamId>, Queue>;
c10::StreamId last_stream = 0;

Queue& queue_of(const Stream& stream) {
    return queues[{stream.device_index(), stream.id()}];
}

Stream stream_on(DeviceIndex index) {
    return Stream(Stream::UNSAFE, Device(kDevice, index), current_stream[index]);
}

void run_all(const Stream& stream) {
    Guard held(lock);
    auto& queue = queue_of(stream);
    queue.run(queue.given);
}

DeviceIndex index_or_current(Device device) {
    return device.has_index() ? device.index() : current_device;
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kDevice; }
    Device getDevice() const override { return Device(kDevice, current_device); }
    void setDevice(Device device) const override {
        TORCH_CHECK(index_or_current(device) < kDevices, "there is no ", device);
        current_device = index_or_current(device);
    }
    void uncheckedSetDevice(Device device) const noexcept override { current_device = index_or_current(device); }
    Device exchangeDevice(Device device) const override {
        auto before = getDevice();
        setDevice(device);
        return before;
    }
    DeviceIndex deviceCount() const noexcept override { return kDevices; }

    Stream getStream(Device device) const override { return stream_on(index_or_current(device)); }
    Stream getDefaultStream(Device device) const override {
        return Stream(Stream::DEFAULT, Device(kDevice, index_or_current(device)));
    }
    Stream getNewStream(Device device, int = 0) const override {
        Guard held(lock);
        return Stream(Stream::UNSAFE, Device(kDevice, index_or_current(device)), ++last_stream);
    }
    Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
    Stream exchangeStream(Stream stream) const override {
        auto before = stream_on(stream.device_index());
        current_stream[stream.device_index()] = stream.id();
        return before;
    }
    bool queryStream(const Stream& stream) const override {
        Guard held(lock);
        auto& queue = queue_of(stream);
        return queue.done == queue.given;
    }
    void synchronizeStream(const Stream& stream) const override { run_all(stream); }
    void synchronizeDevice(const DeviceIndex index) const override {
        Guard held(lock);
        for (auto& [stream, queue] : queues)
            if (stream.first == index) queue.run(queue.given);
    }

    void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
        Guard held(lock);
        auto& queue = queue_of(stream);
        if (!*event) *event = new Mark;
        *static_cast<Mark*>(*event) = {&queue, queue.given};
    }
    void block(void* event, const Stream& stream) const override {
        Guard held(lock);
        auto mark = *static_cast<Mark*>(event);
        queue_of(stream).give([mark] { mark.queue->run(mark.at); });
    }
    // Asking again and again gets on, too: the first answer is no.
    bool queryEvent(void* event) const override {
        Guard held(lock);
        if (!event) return true;
        auto mark = *static_cast<Mark*>(event);
        bool ready = mark.queue->done >= mark.at;
        mark.queue->run(mark.at);
        return ready;
    }
    void synchronizeEvent(void* event) const override { queryEvent(event); }
    void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
    double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

// Memory

struct Held {
    char* host;
    size_t nbytes;
    std::map<Queue*, uint64_t> readers;  // streams that use it, and how far they must be before it is reused
};

auto& blocks = *new std::map<char*, Held*>;              // all, by address
auto& freed = *new std::map<size_t, std::vector<Held*>>;  // by size

void give_back(void* context) {
    Guard held(lock);
    auto* block = static_cast<Held*>(context);
    counts["allocated_bytes"] -= block->nbytes;
    for (auto& [queue, until] : block->readers) until = queue->given;
    freed[block->nbytes].push_back(block);
}

Held* reuse(size_t nbytes) {
    auto& found = freed[nbytes];
    for (size_t at = found.size(); at-- > 0;) {
        auto* block = found[at];
        bool ready = true;
        for (auto& [queue, until] : block->readers) ready = ready && queue->done >= until;
        if (!ready) continue;
        block->readers.clear();
        found.erase(found.begin() + at);
        ++counts["reused"];
        return block;
    }
    return nullptr;
}

struct DeviceMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        Guard held(lock);
        ++counts["allocations"];
        if (refused > 0 && --refused == 0)
            TORCH_CHECK_WITH(OutOfMemoryError, false, "fakedev out of memory: tried to allocate ", nbytes, " bytes");
        run_all(stream_on(current_device));  // its work comes before that of the next owner
        auto* block = reuse(nbytes);
        if (!block) {
            block = new Held{static_cast<char*>(std::malloc(std::max<size_t>(nbytes, 1))), nbytes, {}};
            blocks[block->host] = block;
        }
        std::memset(block->host, 0xEE, nbytes);  // fresh memory is not zero, and the next owner writes to it
        counts["allocated_bytes"] += nbytes;
        counts["peak_bytes"] = std::max(counts["peak_bytes"], counts["allocated_bytes"]);
        auto far = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(block->host) + kFar);
        return {far, block, &give_back, Device(kDevice, current_device)};
    }
    void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "fakedev copies no raw data"); }
};

auto& device_memory = *new DeviceMemory;
auto& pinned = *new std::map<char*, size_t>;

bool is_pinned(const void* address) {
    Guard held(lock);
    auto* byte = static_cast<char*>(const_cast<void*>(address));
    auto after = pinned.upper_bound(byte);
    return after != pinned.begin() && byte < std::prev(after)->first + std::prev(after)->second;
}

void unpin(void* address) {
    Guard held(lock);
    pinned.erase(static_cast<char*>(address));
    std::free(address);
}

auto& registered = *new std::map<char*, size_t>;
auto& in_flight = *new std::multiset<char*>;  // host addresses that waiting copies use

int64_t pin(uintptr_t address, size_t nbytes) {
    Guard held(lock);
    if (refuse_pin) return 2;
    auto* first = reinterpret_cast<char*>(address);
    if (is_pinned(first)) return 712;
    pinned[first] = registered[first] = nbytes;
    counts["registered_bytes"] += nbytes;
    counts["most_registered_bytes"] = std::max(counts["most_registered_bytes"], counts["registered_bytes"]);
    ++counts["registrations"];
    return 0;
}

int64_t unpin_registered(uintptr_t address) {
    Guard held(lock);
    auto* first = reinterpret_cast<char*>(address);
    auto found = registered.find(first);
    if (found == registered.end()) return 713;
    auto used = in_flight.lower_bound(first);
    TORCH_CHECK(used == in_flight.end() || *used >= first + found->second, "unpinned while a copy uses the memory");
    counts["registered_bytes"] -= found->second;
    pinned.erase(first);
    registered.erase(found);
    return 0;
}

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        Guard held(lock);
        auto* address = static_cast<char*>(std::aligned_alloc(4096, (nbytes / 4096 + 1) * 4096));
        pinned[address] = std::max<size_t>(nbytes, 1);
        counts["pinned_allocations"] += 1;
        return {address, address, &unpin, Device(c10::DeviceType::CPU)};
    }
    void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};

auto& pinned_memory = *new PinnedMemory;

void* near(const void* address) {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) & ~kFar);
}

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return kDevices; }
    DeviceIndex getCurrentDevice() const override { return current_device; }
    void setCurrentDevice(DeviceIndex index) const override { GuardImpl().setDevice(Device(kDevice, index)); }
    DeviceIndex exchangeDevice(DeviceIndex index) const override {
        return GuardImpl().exchangeDevice(Device(kDevice, index)).index();
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
        return index < 0 ? current_device : exchangeDevice(index);
    }
    bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        c10::DeviceGuard on(storage.device());
        auto data = device_memory.allocate(nbytes);
        auto* to = static_cast<char*>(near(data.get()));
        if (nbytes && storage.nbytes()) std::memcpy(to, near(storage.data()), std::min(nbytes, storage.nbytes()));
        storage.set_data_ptr_noswap(std::move(data));
        storage.set_nbytes(nbytes);
    }
};

// Tensors

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
    c10::DeviceGuard on(Device(kDevice, device ? index_or_current(*device) : current_device));
    return at::detail::empty_strided_generic(size, stride, &device_memory, kKeys, at::dtype_or_default(dtype));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard on(Device(kDevice, device ? index_or_current(*device) : current_device));
    return at::detail::empty_generic(size, &device_memory, kKeys, at::dtype_or_default(dtype), format);
}

at::Tensor near(const at::Tensor& tensor) {
    auto* first = static_cast<char*>(near(tensor.storage().data())) + tensor.storage_offset() * tensor.itemsize();
    auto alias = at::from_blob(first, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    return alias;
}

bool lie_alike(const at::Tensor& a, const at::Tensor& b) {
    if (a.numel() <= 1 || (a.is_contiguous() && b.is_contiguous() && a.dtype() == b.dtype())) return true;
    return a.dtype() == b.dtype() && a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

void copy_between(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
    Guard held(lock);
    if (!falling_back) {
        std::string way = self.is_cpu() ? "to_device" : dst.is_cpu() ? "to_host" : "on_device";
        ++counts[way];
        counts[way + "_bytes"] += dst.nbytes();
    }
    if (self.is_cpu() != dst.is_cpu() && !lie_alike(self, dst)) {
        c10::DeviceGuard on((self.is_cpu() ? dst : self).device());
        device_memory.allocate(dst.nbytes());
    }
    const auto& host = self.is_cpu() ? self : dst;
    // Holds the host's memory, not the tensors: to let go of those may take the interpreter, which may wait for the
    // lock. The device's memory is not held: whoever frees it must know that nobody reads it.
    auto copy = [to = near(dst), from = near(self), kept = host.storage()] {
        at::AutoDispatchBelowADInplaceOrView below;
        to.copy_(from);
    };
    auto stream = stream_on((self.is_cpu() ? dst : self).device().index());
    if (non_blocking && (!host.is_cpu() || is_pinned(host.storage().data()))) {
        auto& queue = queue_of(stream);
        ++queue.copies;
        counts["most_waiting"] = std::max(counts["most_waiting"], queue.copies);
        auto used = in_flight.insert(static_cast<char*>(near(host.storage().data())) + host.storage_offset());
        queue.give([&queue, copy, used] {
            --queue.copies;
            in_flight.erase(used);
            copy();
        });
    } else {
        run_all(stream);
        copy();
    }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
    copy_between(self, dst, non_blocking);
    return dst;  // without the lock: it may take the interpreter
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
    auto* tensor = self.unsafeGetTensorImpl();
    tensor->set_sizes_contiguous(size);
    size_t needed = (tensor->storage_offset() + tensor->numel()) * tensor->itemsize();
    auto storage = tensor->unsafe_storage();
    if (needed > storage.nbytes()) {
        run_all(stream_on(self.device().index()));
        c10::DeviceGuard on(self.device());
        auto data = device_memory.allocate(needed);
        if (storage.nbytes()) std::memcpy(near(data.get()), near(storage.data()), storage.nbytes());
        storage.set_data_ptr_noswap(std::move(data));
        storage.set_nbytes(needed);
    }
    return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
    dst.resize_(self.sizes());
    return copy_from(self, dst, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
    auto value = at::empty({}, at::TensorOptions().dtype(self.dtype()));
    copy_from(self, value, false);
    return value.item();
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             offset ? std::make_optional(offset->expect_int()) : std::nullopt);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
    return at::cpu::set_(self, std::move(source), offset, size, stride);
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
    auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
    return at::cpu::set_(self, std::move(source), 0, {size}, {1});
}

void record_stream(at::Tensor& self, Stream stream) {
    Guard held(lock);
    // What the stream will have been told by the time the memory is freed is not known yet: all of it counts.
    auto block = blocks.upper_bound(static_cast<char*>(near(self.storage().data())));
    if (block != blocks.begin()) std::prev(block)->second->readers[&queue_of(stream)] = 0;
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    for (DeviceIndex index = 0; index < kDevices; ++index) run_all(stream_on(index));
    bool before = falling_back;
    falling_back = true;
    try {
        at::native::cpu_fallback(op, stack);
    } catch (...) {
        falling_back = before;
        throw;
    }
    falling_back = before;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", as_strided);
    m.impl("view", at::native::view);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("resize_", resize_);
    m.impl("set_.source_Storage", set_whole);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Tensor", at::native::set_tensor_);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", local_scalar);
    m.impl("record_stream", record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

// `_copy_from` sees to these bits itself; torch would resolve them first by a copy, which it would resolve first ...
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    c10::SetAllocator(kDevice, &device_memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    auto def = [&m](auto name, auto function) { m.def(name, function, py::call_guard<py::gil_scoped_release>()); };
    def("counts", [] {
        Guard held(lock);
        return counts;
    });
    def("reset", [] {
        Guard held(lock);
        auto allocated = counts["allocated_bytes"];
        counts.clear();
        counts["allocated_bytes"] = counts["peak_bytes"] = allocated;
        for (auto& [address, nbytes] : registered) counts["registered_bytes"] += nbytes;
        counts["most_registered_bytes"] = counts["registered_bytes"];
        refused = 0;
        refuse_pin = false;
    });
    def("refuse_allocation", [](int64_t nth) {
        Guard held(lock);
        refused = nth;
    });
    def("pin", pin);
    def("unpin", unpin_registered);
    def("refuse_pin", [] { refuse_pin = true; });
    def("waiting", [] {
        Guard held(lock);
        int64_t sum = 0;
        for (auto& [stream, queue] : queues) sum += queue.copies;
        return sum;
    });
    def("device_count", [] { return kDevices; });
    def("current_device", [] { return current_device; });
    def("set_device", [](DeviceIndex index) { GuardImpl().setDevice(Device(kDevice, index)); });
}
