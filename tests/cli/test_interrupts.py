"""A signal may come at any moment, and whatever was made by then is removed."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from snapshot.io.system import hold_signals, unwind_on_signals


def send(number: int) -> None:
    os.kill(os.getpid(), number)  # to our own main thread: handled before the next line


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_unwind_on_signals_raises_and_restores_the_handler(number: int, raised: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with pytest.raises(raised), unwind_on_signals():
        send(number)
    assert signal.getsignal(number) is before


def test_hold_signals_delays_a_signal_until_the_block_ends() -> None:
    noted = []

    def make() -> None:
        with unwind_on_signals(), hold_signals():
            with hold_signals():
                send(signal.SIGTERM)
                noted.append("inner")
            noted.append("outer")

    with pytest.raises(SystemExit) as stopped:
        make()
    assert noted == ["inner", "outer"]
    assert stopped.value.code == 143


def test_unwind_on_signals_ignores_a_second_signal_during_cleaning() -> None:
    cleaned = []

    @contextmanager
    def cleaning() -> Iterator[None]:
        try:
            yield
        finally:
            send(signal.SIGINT)
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt), unwind_on_signals(), cleaning():
        send(signal.SIGINT)
    assert cleaned == [True]


def test_unwind_on_signals_can_be_used_again_after_a_signal() -> None:
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), unwind_on_signals():
            send(signal.SIGINT)
