"""Start JupyterLab on the chapters and open one in Chromium, as a reader would."""

import asyncio
import contextlib
import os
import queue
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SHOTS = Path(__file__).parent / "shots"
_CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

CHAPTERS = sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb"))

# A click on Run All before the kernel answers is lost; wait inside the page instead.
_WHEN_READY = """async () => {
  const app = window.jupyterapp;
  await app.restored;
  const notebook = app.shell.currentWidget;
  await notebook.context.ready;
  await notebook.sessionContext.ready;
  await notebook.sessionContext.session.kernel.info;
  %s
}"""
_RUN_ALL = _WHEN_READY % "return app.commands.execute('notebook:run-all-cells');"
_RUN_LAST = (
    _WHEN_READY
    % """
  const {content} = notebook;
  content.activeCellIndex = content.widgets.findLastIndex((cell) => cell.model.type === 'code');
  await app.commands.execute('notebook:run-cell');
"""
)
PICTURE_DIGEST = """async (image) => {
  const bytes = await (await fetch(image.src)).arrayBuffer();
  const digest = await crypto.subtle.digest('SHA-256', bytes);
  return image.naturalWidth + ':' + Array.from(new Uint8Array(digest)).join();
}"""

_PICTURE_EXTENT = """(root) => {
  const {x, y, width, height} = root.querySelector('img.kv-picture').getBoundingClientRect();
  return {x, y, width, height};
}"""


def chromium_path():
    """Return Chromium's path, or None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("KVLIB_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def lab_server(home, folder=NOTEBOOKS):
    """Serve a copy of a folder with JupyterLab on a free loopback port; give its base URL.

    A copy, since JupyterLab saves what it runs.
    """
    home, port = Path(home), free_port()
    served = home / f"served_{port}"
    shutil.copytree(folder, served)
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    options = [
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=kvlib",
        f"--ServerApp.root_dir={served}",
        f"--LabApp.app_settings_dir={NOTEBOOKS / 'lab'}",
        "--expose-app-in-browser",
    ]
    with open(home / "lab.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        _wait_for(f"http://127.0.0.1:{port}/api", server, home / "lab.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:  # it waits for kernels that wait for it
            server.kill()
            server.wait()


def _wait_for(url, server, log):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def delayed(base_url, seconds):
    """Put a far-away network between browser and server: every byte arrives later; give a URL."""
    target, started = int(base_url.rpartition(":")[2]), queue.Queue()

    async def carry(reader, writer):
        loop, chunks = asyncio.get_running_loop(), asyncio.Queue()

        async def receive():
            while chunk := await reader.read(65_536):
                chunks.put_nowait((loop.time() + seconds / 2, chunk))
            chunks.put_nowait((loop.time(), b""))

        receiving = asyncio.ensure_future(receive())
        try:
            while True:
                due, chunk = await chunks.get()
                await asyncio.sleep(max(0, due - loop.time()))
                if not chunk:
                    break
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass  # the browser closed the page
        finally:
            receiving.cancel()
            writer.close()

    async def connect(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        with contextlib.suppress(asyncio.CancelledError):  # the server stops
            await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    async def serve():
        stop = asyncio.Event()
        async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
            started.put((server.sockets[0].getsockname()[1], asyncio.get_running_loop(), stop))
            await stop.wait()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    thread = threading.Thread(target=asyncio.run, args=[serve()], daemon=True)
    thread.start()
    port, loop, stop = started.get(timeout=10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def launch(playwright):
    """Start the Chromium that all browser programs here use."""
    return playwright.chromium.launch(executable_path=chromium_path(), args=_CHROMIUM_FLAGS)


def open_chapter(page, base_url, name, *, run=True):
    """Open one notebook in JupyterLab and run it; fail if a cell shows an error."""
    page.goto(f"{base_url}/doc/tree/{name}.ipynb?reset&token=kvlib")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    if run:
        run_all(page)


def run_all(page):
    """Run every cell of the open notebook; fail if one shows an error."""
    assert page.evaluate(_RUN_ALL), "a cell failed"
    check_no_traceback(page)
    page.locator(".kv-panel").first.wait_for(timeout=30_000)


def run_last(page):
    """Run the open notebook's last code cell, whatever it shows."""
    page.evaluate(_RUN_LAST)


def check_no_traceback(page):
    """Fail if a cell shows an error, or a widget printed one."""
    for kind in ("error", "stderr"):
        shown = page.locator(f"[data-mime-type='application/vnd.jupyter.{kind}']")
        assert shown.count() == 0, shown.all_inner_texts()


def open_panel(root):
    """Scroll to a panel, lift its veil and unfold its assumptions."""
    root.scroll_into_view_if_needed()
    skip = root.get_by_role("button", name="Just show me")
    if skip.count() and skip.is_visible():
        skip.click()
    root.locator(".kv-sentence .widget-html-content > div").wait_for(timeout=20_000)
    fold = root.get_by_role("button", name="Assumptions")
    if fold.count() and root.locator(".widget-toggle-button.mod-active").count() == 0:
        fold.press("Space")
        root.page.wait_for_timeout(300)


def stop_kernels(page):
    page.evaluate("async () => window.jupyterapp.serviceManager.sessions.shutdownAll()")


class Panel:
    """What a reader sees of one panel."""

    def __init__(self, root):
        self.root, self.page = root, root.page
        open_panel(root)

    @property
    def sentence(self):
        return self.root.locator(".kv-sentence .widget-html-content").inner_text()

    @property
    def picture(self):
        return self.root.locator("img.kv-picture").evaluate(PICTURE_DIGEST)

    @property
    def extent(self):
        """The picture's x, y, width and height: read at once, for a drag replaces the element."""
        return self.root.evaluate(_PICTURE_EXTENT)

    def until(self, condition, what):
        for _ in range(800):
            if condition():
                return
            self.page.wait_for_timeout(25)
        raise AssertionError(f"waited 20 s for {what}; sentence: {self.sentence!r}")

    def press(self, slider, key="ArrowRight"):
        """Press a key on a slider; wait for a new picture and a new sentence."""
        sentence, picture = self.sentence, self.picture
        slider.press(key)
        self.until(lambda: self.sentence != sentence, f"a sentence other than {sentence!r}")
        self.until(lambda: self.picture != picture, "another picture")

    def settle(self):
        self.page.wait_for_timeout(600)


def panels_of(page):
    found = [Panel(root) for root in page.locator(".kv-panel").all()]
    assert found, "the chapter has no panel"
    return found


def check_code(panel, namespace):
    """The code in the sentence gives a number that stands in the sentence."""
    code = panel.root.locator(".kv-sentence code").last.inner_text()
    value = eval(code, dict(namespace))
    words = panel.sentence.replace(code, "")
    assert re.search(rf"(?<![\d.,]){re.escape(f'{value:,}')}(?![\d]|[.,]\d)", words), (value, words)


def position(slider):
    return int(float(slider.get_attribute("aria-valuenow")))
