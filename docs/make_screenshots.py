"""The screenshots of logged-metrics.md: TensorBoard on a folder of runs, in headless Chromium.

After `make quickstart`, with Chromium installed: python docs/make_screenshots.py runs
"""

import asyncio
import base64
import io
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from aiohttp import ClientSession, ClientWebSocketResponse
from PIL import Image

PAGES = {
    "tensorboard-curves.png": ("#custom_scalars&_smoothingWeight=0", (1320, 1010)),
}
"""File, address under TensorBoard's, and size in pixels."""

CHROMIUM = (
    "chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars"
)
COLORS = 64
SECONDS_TO_READ = 60
"""That TensorBoard may take to read a run."""
SECONDS_TO_DRAW = 5


def wait_for_reward(address: str) -> None:
    """Wait until TensorBoard has read a run."""
    end = time.monotonic() + SECONDS_TO_READ
    while time.monotonic() < end:
        with urlopen(f"{address}data/plugin/scalars/tags") as reply:
            if any("reward/mean" in tags for tags in json.load(reply).values()):
                return
        time.sleep(1)
    raise TimeoutError(f"no run with rewards after {SECONDS_TO_READ} s")


async def call(page: ClientWebSocketResponse, method: str, **params: Any) -> dict[str, Any]:
    """Call a method of the DevTools protocol."""
    await page.send_json({"id": 1, "method": method, "params": params})
    async for message in page:
        if "id" in (reply := message.json()):
            return dict(reply["result"])
    raise ConnectionError(f"Chromium left during {method}")


async def take(devtools: str, address: str) -> None:
    """Write the screenshots beside this file.

    Args:
        devtools: Chromium's address.
        address: TensorBoard's.
    """
    async with ClientSession() as session, session.get(f"{devtools}/json/list") as reply:
        (target,) = (target for target in await reply.json() if target["type"] == "page")
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as page:
            await call(page, "Page.navigate", url=address)
            await asyncio.sleep(SECONDS_TO_DRAW)
            # As a click on "Ignore outliers in chart scaling" does, which otherwise cuts curves off.
            await call(page, "Runtime.evaluate", expression="localStorage.setItem('_ignoreYOutliers', 'false')")
            for name, (path, (width, height)) in PAGES.items():
                size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                await call(page, "Emulation.setDeviceMetricsOverride", **size)
                await call(page, "Page.navigate", url="about:blank")  # or only the fragment changes, without a load
                await call(page, "Page.navigate", url=address + path)
                await asyncio.sleep(SECONDS_TO_DRAW)
                data = (await call(page, "Page.captureScreenshot"))["data"]
                image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB").quantize(COLORS)
                image.save(Path(__file__).parent / name, optimize=True)


def started(server: subprocess.Popen[str], pattern: str) -> str:
    """What a program writes to standard error when it listens: the pattern's group."""
    assert server.stderr is not None
    return next(found[1] for line in server.stderr if (found := re.search(pattern, line)))


def main(runs: str) -> None:
    """Start TensorBoard and Chromium, and take the screenshots."""
    tensorboard = [sys.executable, "-m", "tensorboard.main", "--logdir", runs, "--port", "0", "--load_fast", "false"]
    with tempfile.TemporaryDirectory() as profile, subprocess.Popen(tensorboard, stderr=-1, text=True) as server:
        chromium = [*CHROMIUM.split(), "--remote-debugging-port=0", f"--user-data-dir={profile}"]
        with subprocess.Popen(chromium, stderr=-1, text=True) as browser:
            try:
                address = started(server, r"(http://\S+/)")
                wait_for_reward(address)
                asyncio.run(take("http://" + started(browser, r"ws://([\d.:]+)/"), address))
            finally:
                browser.terminate()
                server.terminate()


if __name__ == "__main__":
    main(sys.argv[1])
