"""What kind of failures a run has had: `python -m tests.flaky STATUS LASTFAILED`.

STATUS is that of pytest, and LASTFAILED the file of its cache that names the failed tests. Each of them runs again,
alone. One that passes then depends on the other tests, on chance, or on the load of the machine. The run has failed all
the same: the status is 0 only if all failed tests pass alone, and tests/flaky.txt names them all.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

MOST = 50
"""Failed tests that run again. More of them are not a matter of chance."""
LIST = Path(__file__).with_name("flaky.txt")
LINE = re.compile(r"(?P<name>\S+::.*\S)  (?P<date>\d{4}-\d\d-\d\d)  (?P<cause>\S.*)")


def read_known():
    """Return the names in tests/flaky.txt. Each line must have a date and a cause."""
    known = set()
    for line in LIST.read_text().splitlines():
        if line and line[0] != "#":
            found = LINE.fullmatch(line)
            if not found:
                raise ValueError(
                    f"a line of {LIST.name} must be NAME, DATE and CAUSE, each two blanks apart, got {line!r}"
                )
            known.add(f"tests/{found['name']}")
    return known


def main(status, lastfailed):
    """Run the failed tests again, each alone, and print what became of them."""
    failed = list(json.loads(Path(lastfailed).read_text())) if Path(lastfailed).exists() else []
    if int(status) != 1 or not 0 < len(failed) <= MOST:  # 1: the run has ended, and some tests have failed
        print(f"{len(failed)} tests failed, and the status of pytest is {status}: none of them runs again")
        return 1
    known, excused = read_known(), True
    print("\nTests that failed, each again, alone:")
    for name in failed:
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", name]
        passed = subprocess.run(command, capture_output=True, check=False).returncode == 0
        excused = excused and passed and name in known
        print(f"{'passes alone' if passed else 'fails alone, too'}{' (known)' if name in known else ''}: {name}")
    return 0 if excused else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
