"""Move controls of all chapters at random for minutes; nothing may break, and memory must stay.

python tests/browser/soak.py [--minutes 10] [--seed 0] [chapter ...]

Fails on a traceback in a page or in the server's log, on a picture that is not there or not sharp
once idle, on a last value that did not arrive, and on a kernel that grows by more than 150 MiB.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.browser import lab

KEYS = ["ArrowRight"] * 6 + ["ArrowLeft"] * 6 + ["PageUp", "PageDown", "Home", "End"]
MAX_GROWTH = 150 * 2**20


def kernel_bytes():
    """Return the memory of the largest kernel that this process' server runs."""
    family = psutil.Process().children(recursive=True)
    kernels = [p for p in family if "ipykernel_launcher" in " ".join(p.cmdline())]
    return max((p.memory_info().rss for p in kernels), default=0)


def drag(root, rng):
    """Press up to 25 keys on a slider of a panel; return its number and how far it stands."""
    sliders = root.get_by_role("slider")
    k = rng.randrange(sliders.count())
    sliders.nth(k).focus()
    for _ in range(rng.randint(1, 25)):
        root.page.keyboard.press(rng.choice(KEYS))
    return k, float(sliders.nth(k).get_attribute("aria-valuenow"))


def poke(root, rng):
    """Move one control of a panel."""
    kind = rng.choice(["slider"] * 6 + ["list", "reset"])
    if kind == "list" and (lists := root.get_by_role("combobox").all()):
        chosen = rng.choice(lists)
        chosen.select_option(rng.choice(chosen.locator("option").all_inner_texts()))
    elif kind == "reset":
        root.get_by_role("button", name="Reset").click()
    else:
        drag(root, rng)


def wait_until_idle(root):
    """Wait until nothing of a panel changes: the kernel may have seconds of moves to answer."""
    before = None
    while before != (before := root.inner_html()):
        root.page.wait_for_timeout(900)


def check(page, root, rng, seen):
    """Move a slider of an idle panel; once it is idle again, all must be there and up to date."""
    wait_until_idle(root)  # or an answer to an earlier move could look like this one's end
    k, index = drag(root, rng)
    wait_until_idle(root)
    # A slider's values ascend with the thumb. A box that missed the last one breaks the order.
    stands = float(root.get_by_role("slider").nth(k).get_attribute("aria-valuenow"))
    value = float(root.get_by_role("spinbutton").nth(k).input_value())
    assert stands == index, f"slider {k}: left at {index:g}, now at {stands:g}, box {value:g}"
    seen.setdefault(k, {})[index] = value
    values = [value for _, value in sorted(seen[k].items())]
    assert values == sorted(set(values)), f"slider {k}: {seen[k]}"
    image = root.locator("img.kv-picture")
    assert image.evaluate("i => i.complete && i.naturalWidth > 0"), "no picture"
    assert image.evaluate("i => i.naturalWidth") == 1440, "not sharp when idle"
    assert root.locator(".kv-sentence .widget-html-content").inner_text(), "no sentence"
    lab.check_no_traceback(page)


def soak(page, base_url, name, seconds, rng):
    """Move controls of one chapter; return how often, and the kernel's memory before and after."""
    lab.open_chapter(page, base_url, name)
    roots = page.locator(".kv-panel").all()
    seen = [{} for _ in roots]  # of each panel: slider -> thumb's position -> value
    for root in roots:
        lab.open_panel(root)
    moves, before, end = 0, None, time.monotonic() + seconds
    while time.monotonic() < end:
        number = rng.randrange(len(roots))
        for _ in range(10):
            poke(roots[number], rng)
            moves += 1
        check(page, roots[number], rng, seen[number])
        if before is None and time.monotonic() > end - seconds * 0.6:
            before = kernel_bytes()  # warm by now: backgrounds and fonts are cached
    after = kernel_bytes()
    lab.stop_kernels(page)
    return moves, before or after, after


def main():
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    names = arguments.chapters or lab.CHAPTERS
    rng, share = random.Random(arguments.seed), arguments.minutes * 60 / len(names)
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        chromium = lab.launch(playwright)
        page = chromium.new_page(viewport={"width": 1200, "height": 1000})
        with lab.lab_server(home) as base_url:
            for name in names:
                moves, before, after = soak(page, base_url, name, share, rng)
                grown = (after - before) / 2**20
                print(
                    f"{name:<24} {moves:5d} moves, kernel {after / 2**20:,.0f} MiB, {grown:+,.0f}"
                )
                assert after - before < MAX_GROWTH, f"{name}: the kernel grew by {grown:,.0f} MiB"
        log = (Path(home) / "lab.log").read_text()
        assert "Traceback" not in log, log[-3000:]
        chromium.close()


if __name__ == "__main__":
    main()
