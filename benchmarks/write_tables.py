"""Write the tables of docs/performance.md from the records in benchmarks/results/, or check that they are (--check).

A table stands between two comments, of which the first says what it is:

    <!-- table RECORD.json LAYOUT [CASES] -->  ...  <!-- end of table -->

LAYOUT: `pairs`, a line for each ratio; `variants`, a line for each variant and columns for each case; `device`, a line
for each variant with what is known of a GPU; `plan`, what tools/check_plan.py --json found; `runs`, a line for each run
of the command with what is added to it. CASES: how the names of the
cases begin that it shows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import machine, versions, write_json

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
RESULTS = PAGE.parents[1] / "benchmarks" / "results"
TABLE = re.compile(r"(<!-- table (\S+) (\w+)(?: (\w+))? -->\n).*?(<!-- end of table -->)", re.S)
Json = dict[str, Any]


def page_with_tables(text: str) -> str:
    """The page with every table written anew."""
    return TABLE.sub(lambda found: found[1] + block(found[2], found[3], found[4] or "") + found[5], text)


def block(name: str, layout: str, beginning: str) -> str:
    """Where the figures are from, and the table."""
    record = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    cases = [case for case in record.get("cases", []) if case["name"].startswith(beginning)]
    tables = {"pairs": pairs, "variants": variants, "device": device}
    of_record = {"plan": lambda: plan(record["layouts"]), "runs": lambda: runs(record["runs"])}
    rows = of_record[layout]() if layout in of_record else tables[layout](cases)
    where = (record["machine"].get("gpus") or [record["machine"]["cpu"]])[0]
    about = f"`{record['command']}`, {record['date'][:10]}, {where}; `benchmarks/results/{name}`."
    lines = [f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    return "\n".join([about, "", *lines, ""])


def pairs(cases: list[Json]) -> list[list[str]]:
    """What, ours, the peer, how many times as fast."""
    rows = [["what", "megalite", "peer", "ratio"]]
    for case in cases:
        for ours, peer in case["pairs"]:
            if f"{ours} / {peer}" in case["ratios"]:
                form = short(ours)
                cells = [f"{case['name']}{form}", value(case, ours), f"{peer.split(',')[0]} {value(case, peer)}"]
                rows.append([*cells, f"{case['ratios'][f'{ours} / {peer}']['median']:.2f}"])
    return rows


def device(cases: list[Json]) -> list[list[str]]:
    """Time, rate, MFU, peak memory of each variant, its launches where they were counted, and how many times as fast it
    is as its peers."""
    counts = any("launches" in found for case in cases for found in case["variants"].values())
    rows = [["what", "ms", "tokens/s", "MFU", "peak GiB", *(["launches"] if counts else []), "times as fast as"]]
    for case in cases:
        for name, found in case["variants"].items():
            rate, mfu = (f"{found['rate']:,.0f}" if "rate" in found else "", found.get("mfu"))
            beside = [
                f"{case['ratios'][f'{ours} / {peer}']['median']:.2f} {peer}"
                for ours, peer in case["pairs"]
                if ours == name and f"{ours} / {peer}" in case["ratios"]
            ]
            memory = f"{found['device_mib'] / 1024:.1f}" if "device_mib" in found else ""
            launches = [str(found.get("launches", ""))] if counts else []
            cells = [f"{1e3 * found['median']:,.4g}", rate, f"{mfu:.1%}" if mfu else "", memory, *launches]
            rows.append([f"{case['name']}: {name}" if counts else name, *cells, ", ".join(beside)])
    return rows


def short(ours: str) -> str:
    """Which of our variants: what follows `megalite`."""
    form = ours.removeprefix("megalite").lstrip("-, ")
    return f", {form}" if form else ""


def variants(cases: list[Json]) -> list[list[str]]:
    """Variants below each other, cases beside each other, each with the ratio to its base where that is known."""
    names = dict.fromkeys(name for case in cases for name in case["variants"])
    common = os.path.commonprefix([case["name"] for case in cases])
    common = common if len(cases) == 1 else common[: common.rfind(", ") + 1]
    rows = [["variant"], *([name] for name in names)]
    for case in cases:
        title = case["name"].removeprefix(common).strip(", ")
        title = f"{title}: " if title else ""
        for head, cells in columns(case, list(names)):
            for row, cell in zip(rows, [title + head, *cells], strict=True):
                row.append(cell)
    return rows


def columns(case: Json, names: list[str]) -> list[tuple[str, list[str]]]:
    """Heading and cells of each column of a case."""
    found = [(case["unit"], [value(case, name, unit=False) for name in names])]
    ratios = {name: case["ratios"].get(f"{name} / {case['base']}", {}).get("median") for name in names}
    ratios[case["base"]] = 1.0
    if case["unit"] == "MiB":
        live = [str(case["variants"].get(name, {}).get("live_mib", "")) for name in names]
        shares = [f"{1 / ratio:.2f}" if (ratio := ratios.get(name)) else "" for name in names]
        return [("live tensors, MiB", live), ("process, MiB", found[0][1]), (f"of {case['base']}", shares)]
    if any(ratios[name] for name in names if name != case["base"]):
        found.append((f"against {case['base']}", [f"{ratios[name]:.2f}" if ratios[name] else "" for name in names]))
    return found


def value(case: Json, name: str, *, unit: bool = True) -> str:
    """The rate of a variant, or its time or memory."""
    found = case["variants"].get(name)
    if found is None or not {"rate", "median"} & found.keys():
        return ""
    number = (
        found["median"] * (1e3 if case["unit"] == "ms" else 1.0) if case["unit"] in ("ms", "MiB") else found["rate"]
    )
    if case["unit"] == "MiB" and found["highest"] - found["lowest"] >= 1:
        return f"{found['lowest']:.0f} to {found['highest']:.0f}"
    text = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    if case["unit"] == "MB/s" and unit and "median" in found:
        text = f"{1e3 * found['median']:,.0f} ms, {text}"
    return f"{text} {case['unit']}" if unit else text


def plan(layouts: list[Json]) -> list[list[str]]:
    """Predicted and measured time and memory of each layout."""
    rows = [["layout", "predicted ms", "measured", "error", "predicted MB", "measured", "error"]]
    for row in layouts:
        cells = [row["layout"]]
        for key, scale, digits in (("seconds", 1e3, 0), ("memory", 1e-6, 1)):
            predicted, measured = row[f"predicted_{key}"], row[f"measured_{key}"]
            cells += [f"{predicted * scale:.{digits}f}", f"{measured * scale:.{digits}f}"] if measured else ["", ""]
            cells.append(f"{row[f'{key}_error']:+.1%}" if measured else "")
        rows.append(cells)
    return rows


def runs(found: list[Json]) -> list[list[str]]:
    """Lowest and highest milliseconds, memory, and how far from it the plan and the rehearsal were."""
    rows = [["the command and", "ms a step", "memory measured", "planned", "rehearsed"]]
    for each in found:
        low, high = each["ms"]
        errors = [f"{each[name]:+.1%}" for name in ("planned", "rehearsed")]
        more = f"`{each['more']}`" if each["more"] else "nothing more"
        rows.append([more, f"{low:,} to {high:,}", f"{each['gigabytes']:.2f} GB", *errors])
    return rows


def keep_plan(layouts: list[Json]) -> None:
    """Writes plan.json as of now and here."""
    date, command = datetime.date.today().isoformat(), "python tools/check_plan.py"
    record = {"benchmark": "plan", "date": date, "command": command, "machine": machine(), "versions": versions()}
    write_json(RESULTS / "plan.json", {**record, "layouts": layouts})


def main(argv: list[str] | None = None) -> int:
    """Return 0, or 1 where --check finds the page out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, help="first keep what tools/check_plan.py --json found, as plan.json")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args(argv)
    if options.plan is not None:
        keep_plan(json.loads(options.plan.read_text(encoding="utf-8"))["layouts"])
    text = PAGE.read_text(encoding="utf-8")
    written = page_with_tables(text)
    if options.check:
        if text != written:
            print(f"{PAGE.name}: out of date; run python benchmarks/write_tables.py", file=sys.stderr)
        return int(text != written)
    PAGE.write_text(written, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
