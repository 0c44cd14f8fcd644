"""A real browser for tests: headless Chromium, driven by chromedriver through the WebDriver protocol."""

import base64
import contextlib
import json

import pytest

from tests.helpers.servers import HOST, free_ports, request, running, tool

FLAGS = """
    --headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --disable-default-apps
"""
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, by the specification


class Browser:
    """One window. `log` has the messages of the page's console, with violations of its policy, since the last call."""

    def __init__(self, url):
        self._url = url

    def call(self, method, path, **body):
        """Send a command, and return its value."""
        sent = json.dumps(body) if method == "POST" else None
        answer = request(method, self._url + path, sent, {"Content-Type": "application/json"}, timeout=60)
        value = json.loads(answer.body)["value"]
        if answer.status != 200:
            raise AssertionError(f"{path}: {value['error']}: {value['message']}")
        return value

    def open(self, url):
        self.call("POST", "/url", url=url)

    def run(self, script, *arguments):
        """Run a script in the page: the body of a function."""
        return self.call("POST", "/execute/sync", script=script, args=arguments)

    def until(self, script, *arguments):
        """Run a script whenever the page changes, until it returns something true, and return that."""
        whole = """
            const done = arguments[arguments.length - 1], look = () => {
                const found = (function() { %s }).apply(null, arguments);
                if (found) { watch.disconnect(); done(found); }
            }, watch = new MutationObserver(look);
            watch.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
            look();
        """
        return self.call("POST", "/execute/async", script=whole % script, args=arguments)

    def type(self, selector, text):
        """Replace the text of an input, as with the keyboard."""
        path = f"/element/{self._find(selector)}"
        self.call("POST", f"{path}/clear")
        self.call("POST", f"{path}/value", text=text)

    def click(self, selector):
        self.call("POST", f"/element/{self._find(selector)}/click")

    def _find(self, selector):
        return self.call("POST", "/element", using="css selector", value=selector)[ELEMENT]

    def cdp(self, command, **params):
        """Send a command of Chromium's own protocol."""
        return self.call("POST", "/goog/cdp/execute", cmd=command, params=params)

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def log(self):
        return [each["message"] for each in self.call("POST", "/se/log", type="browser")]


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A window of Chromium, for all tests."""
    program = tool("chromedriver", "apt-get install chromium-driver", "/usr/bin")
    chromium = tool("chromium", "apt-get install chromium", "/usr/bin")
    with open_browser(program, chromium, tmp_path_factory.mktemp("chromium")) as window:
        yield window


@contextlib.contextmanager
def open_browser(program, chromium, folder):
    """Yield a window of Chromium with a profile of its own in `folder`, which is removed then."""
    [port] = free_ports(1)
    url = f"http://{HOST}:{port}"
    flags = [*FLAGS.split(), f"--user-data-dir={folder / 'profile'}", "--window-size=1280,1000"]
    wanted = {"goog:chromeOptions": {"binary": chromium, "args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}

    def ready():
        return request("GET", f"{url}/status").status == 200

    with running(program, f"--port={port}", ready, folder), contextlib.ExitStack() as stack:
        window = Browser(url)
        opened = window.call("POST", "/session", capabilities={"alwaysMatch": wanted})
        window = Browser(f"{url}/session/{opened['sessionId']}")
        stack.callback(window.call, "DELETE", "")
        window.call("POST", "/timeouts", script=30_000)
        yield window
