"""Tables and sentences from results/quality-totals.json: what `nano_quality.py` has measured.

Whatever rows there are is shown; nothing is said of rows that are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
CONTROLS = ("random", "local")
BOOK_OF_RD = "cached:of='rd'"
BOOKS = {"cached": "`cached`, a book of entropy", BOOK_OF_RD: "`cached`, a book of rd"}
GOALS = (0.54, 0.4, 0.3)
OFF = 0.01  # an achieved total farther from the asked one is told
SHORT = {"exponential": "exp", "linear": "lin", "esa": "ESA"}


@dataclass(frozen=True)
class Results:
    """The file of results."""

    told: dict[str, Any]

    @property
    def rows(self) -> list[Row]:
        """Runs that were made."""
        return [row for row in self.told["rows"] if "unreachable" not in row]

    @property
    def steps(self) -> list[int]:
        return sorted({row["steps"] for row in self.rows})

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row["method"] for row in self.rows))

    @property
    def contenders(self) -> list[str]:
        """Those that are compared: as they come; other options stand in a table of their own.

        Among many settings of one method the best would look better than any of them is.
        """
        return [method for method in self.methods if ":" not in method or method == BOOK_OF_RD]

    def some(self, **wanted: Any) -> list[Row]:
        """Runs with these values."""
        return [row for row in self.rows if wanted.items() <= row.items()]

    def totals(self, steps: int) -> list[float]:
        return sorted({row["total"] for row in self.some(steps=steps)}, reverse=True)

    def is_unreachable(self, **wanted: Any) -> bool:
        found = [row for row in self.told["rows"] if wanted.items() <= row.items()]
        return bool(found) and all("unreachable" in row for row in found)

    def better(self, method: str, total: float, steps: int) -> Row | None:
        """A method on the schedule that suits it best; other floors are settings."""
        rows = self.some(method=method, total=total, steps=steps)
        return best(row for row in rows if row["schedule"] in SHORT)

    def best_other(self, row: Row) -> Row | None:
        """The best run of another method at that total."""
        return best(
            o for o in self.compared(row["total"], row["steps"]) if name_of(o) != name_of(row)
        )

    def compared(self, total: float, steps: int) -> list[Row]:
        """All runs of contenders at that total."""
        rows, known = self.some(total=total, steps=steps), self.contenders
        return [r for r in rows if r["method"] in known and r["schedule"] in SHORT]


def name_of(row: Row) -> str:
    """The method without its options; a book of rd chooses as rd does."""
    return "rd" if row["method"] == BOOK_OF_RD else str(row["method"]).split(":")[0]


def shown(method: str) -> str:
    return BOOKS.get(method, f"`{method}`")


def best(rows: Iterable[Row]) -> Row | None:
    """By PSNR; one that did more work than it should counts only where there is no other."""
    return max(rows, key=lambda row: (is_fair(row), row["psnr"]), default=None)


def is_fair(row: Row) -> bool:
    return bool(row["achieved"] <= row["total"] + OFF)


def difference(row: Row, other: Row) -> str:
    """The mean over clips of the difference in PSNR, with its 95 % interval."""
    from jali.evaluation.quality.interval import interval

    pairs = zip(row["clips"]["psnr"], other["clips"]["psnr"], strict=True)
    found = interval([a - b for a, b in pairs])
    if found.mean is None:
        return ""
    if found.high is None:
        return f"{found.mean:+.1f}"
    return f"{found.mean:+.1f} ± {found.high - found.mean:.1f}"


def is_certain(row: Row, other: Row) -> bool:
    """Whether the interval of the difference lies above 0."""
    from jali.evaluation.quality.interval import interval

    pairs = zip(row["clips"]["psnr"], other["clips"]["psnr"], strict=True)
    low = interval([a - b for a, b in pairs]).low
    return low is not None and low > 0


def short(schedule: str) -> str:
    shape, at, floor = schedule.partition("@")
    return SHORT.get(shape, shape) + at + floor


def share(value: float) -> str:
    """.4 as 0.40, .545 as 0.545."""
    return f"{value:.3f}".removesuffix("0")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    marks = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, marks, *rows))


def caption(results: Results) -> str:
    told = results.told
    size, machine = told["size"], told["machine"]
    return (
        f"{size['height']}×{size['width']}×{size['num_frames']}, {told['tokens']:,} tokens, "
        f"{len(told['prompts'])} held-out prompts of the {told['world']} world, guidance "
        f"{told['guidance']:g}, the noise of the dense run; {machine['device']}, {told['dtype']}, "
        f"{told['date']}. A total is the achieved share of *all* self-attention work of a run, "
        f"dense steps and layers included, planning not; it is told where it is more than {OFF:g} "
        f"off."
    )


def methods_tables(results: Results) -> Iterator[str]:
    """Methods and totals, for every number of steps."""
    if not results.rows:
        return
    yield (
        "PSNR in dB against the dense run, on the schedule that suits the method best at that "
        "total: falling exponentially (exp) or linearly (lin) from a dense first step, or as ESA "
        "has it (a fifth of the steps and layer 0 dense, then flat). Behind it the difference to "
        "the best other method, mean over clips ± its 95 % interval. A method in *italics* does "
        "not beat both controls."
    )
    for steps in results.steps:
        totals = results.totals(steps)
        yield f"**{steps} steps**"
        yield table(
            ["method", *(f"total {share(total)}" for total in totals)],
            (
                [shown(m), *(methods_cell(results, m, total, steps) for total in totals)]
                for m in results.contenders
                if results.some(method=m, steps=steps)
            ),
        )


def methods_cell(results: Results, method: str, total: float, steps: int) -> str:
    row = results.better(method, total, steps)
    if row is None:
        return "–" if results.is_unreachable(method=method, total=total, steps=steps) else ""
    text = f"{row['psnr']:.1f} {short(row['schedule'])}"
    other = results.best_other(row)
    first = max(r["psnr"] for r in results.compared(total, steps))
    if other is not None and row["psnr"] == first and is_fair(row):
        text = f"**{text}**"
    controls = [results.better(control, total, steps) for control in CONTROLS]
    beaten = [control for control in controls if control and control["psnr"] >= row["psnr"]]
    if beaten and method not in CONTROLS:
        text = f"*{text}*"
    if other is not None:
        text += f" ({difference(row, other)})"
    if abs(row["achieved"] - total) > OFF:
        text += f" at {row['achieved']:.3f}"
    return text


def schedules_tables(results: Results) -> Iterator[str]:
    """What a schedule is worth to one method."""
    names = ("entropy", "rd")
    for steps in results.steps:
        totals, rows = results.totals(steps), []
        for method in (m for m in results.methods if m in names):
            mine = results.some(method=method, steps=steps)
            schedules = list(dict.fromkeys(row["schedule"] for row in mine))
            for schedule in schedules if len(schedules) > 1 else ():
                at = {"method": method, "schedule": schedule, "steps": steps}
                cells = [schedules_cell(results, total=total, **at) for total in totals]
                rows.append([f"`{method}`", schedule, *cells])
        if rows:
            yield (
                f"**Schedules, {steps} steps**: PSNR in dB; a dash where a schedule cannot have "
                f"the total."
            )
            yield table(["method", "schedule", *(f"total {share(t)}" for t in totals)], rows, 2)


def schedules_cell(results: Results, **at: Any) -> str:
    row = best(results.some(**at))
    if row is None:
        return "–" if results.is_unreachable(**at) else ""
    known = results.better(at["method"], at["total"], at["steps"])
    text = f"{row['psnr']:.1f}"
    if abs(row["achieved"] - at["total"]) > OFF:
        text += f" at {row['achieved']:.3f}"
    return f"**{text}**" if row is known else text


def planning_tables(results: Results) -> Iterator[str]:
    """The arithmetic of plans beside the total."""
    for steps in results.steps:
        totals = [total for total in results.totals(steps) if total in GOALS]
        rows = []
        for method in results.contenders:
            found = [results.better(method, total, steps) for total in totals]
            if any(found):
                rows.append([shown(method), *(planning_cell(row) for row in found)])
        if rows:
            yield (
                f"**Total and planning, {steps} steps**: the achieved total + the arithmetic of "
                f"all plans, as shares of dense attention, and the PSNR that is had for both."
            )
            yield table(["method", *(f"total {share(total)}" for total in totals)], rows)


def planning_cell(row: Row | None) -> str:
    if row is None:
        return ""
    both = row["achieved"] + row["planning"]
    return f"{row['achieved']:.3f} + {row['planning']:.3f} = {both:.3f}: {row['psnr']:.1f} dB"


def options_table(results: Results) -> str | None:
    """Methods with other options, beside themselves as they come on the same schedule."""
    rows = []
    for row in results.rows:
        name, _, options = row["method"].partition(":")
        if row["method"] in results.contenders:
            continue
        same = {name: row[name] for name in ("schedule", "total", "steps")}
        plain = best(results.some(method=name, **same))
        rows.append(
            [
                str(row["steps"]), share(row["total"]), short(row["schedule"]),
                f"`{name}`", f"`{options}`", f"{row['planning']:.3f}",
                f"{row['psnr']:.2f}", "" if plain is None else difference(row, plain),
            ]
        )  # fmt: skip
    rows.sort(key=lambda cells: (int(cells[0]), -float(cells[1]), cells[3]))
    head = ["steps", "total", "schedule", "method", "options", "planning", "PSNR", "difference"]
    return table(head, rows, 5) if rows else None


def goals_table(results: Results) -> str | None:
    """rd against the best other method."""
    rows = []
    for steps in results.steps:
        for total in GOALS:
            own = results.better("rd", total, steps)
            other = None if own is None else results.best_other(own)
            if own is None or other is None:
                continue
            paid = paid_difference(results, own, other)
            rows.append(
                [
                    str(steps), share(total), *run_cells(own), *run_cells(other),
                    difference(own, other), "" if paid is None else f"{paid:+.1f}",
                ]
            )  # fmt: skip
    if not rows:
        return None
    head = ["steps", "total", "rd", "with planning", "PSNR"]
    head += ["best other", "with planning", "PSNR", "difference", "planning paid"]
    return table(head, rows, len(head))


def paid_difference(results: Results, row: Row, other: Row) -> float | None:
    """In dB, to the other's method at the same total *and* planning, between its totals."""
    spent = row["achieved"] + row["planning"]
    totals = results.totals(row["steps"])
    made = [results.better(other["method"], total, row["steps"]) for total in totals]
    points = sorted((r["achieved"] + r["planning"], r["psnr"]) for r in made if r)
    for (less, worse), (more, better) in itertools.pairwise(points):
        if less <= spent <= more > less:
            there: float = worse + (better - worse) * (spent - less) / (more - less)
            return float(row["psnr"]) - there
    return None


def run_cells(row: Row) -> tuple[str, str, str]:
    both = row["achieved"] + row["planning"]
    return f"{shown(row['method'])}, {short(row['schedule'])}", f"{both:.3f}", f"{row['psnr']:.2f}"


def judged_table(results: Results) -> str | None:
    """What the judge sees in the dense clips, and in those of the best run at each total."""
    names = {"colour": "colour", "shape": "shape", "motion": "motion"}
    names |= {"no_more": "nothing more", "no_less": "nothing less"}
    rows = []
    for steps, dense in sorted(results.told["dense"].items(), key=lambda one: int(one[0])):
        rows.append([steps, "dense", "1", *(f"{dense['judge'][name]:.0%}" for name in names)])
        for total in GOALS:
            row = best(results.compared(total, int(steps)))
            if row is not None:
                seen = (f"{row['judge'][name]:.0%}" for name in names)
                rows.append(
                    [
                        steps,
                        f"{shown(row['method'])}, {short(row['schedule'])}",
                        share(total),
                        *seen,
                    ]
                )
    return table(["steps", "run", "total", *names.values()], rows, 2) if rows else None


def rows_section(told: dict[str, Any]) -> str | None:
    """Everything that was measured, with its heading."""
    results = Results(told)
    if not results.rows:
        return None
    parts = ("## nano, every run", caption(results), told.get("note", ""), rows_table(results))
    return "\n\n".join(part for part in parts if part)


def rows_table(results: Results) -> str:
    head = ["steps", "method", "schedule", "total", "achieved", "planning", "PSNR", "SSIM", "LPIPS"]
    head += ["colour", "shape", "motion", "s", "backends"]
    order = sorted(results.rows, key=lambda r: (r["steps"], -r["total"], -r["psnr"]))
    return table(
        head,
        (
            [
                str(r["steps"]), f"`{r['method']}`", r["schedule"], share(r["total"]),
                f"{r['achieved']:.3f}", f"{r['planning']:.3f}", f"{r['psnr']:.2f}",
                f"{r['ssim']:.4f}", f"{r['lpips']:.4f}" if "lpips" in r else "",
                *(f"{r['judge'][name]:.0%}" for name in ("colour", "shape", "motion")),
                f"{r['seconds']:.1f}", ", ".join(r["backends"]),
            ]
            for r in order
        ),
        3,
    )  # fmt: skip


def page(told: dict[str, Any], picture: str | None = None) -> str:
    """All of it, for the page of nano."""
    results = Results(told)
    parts = [caption(results), ceiling(results)]
    if picture:
        parts.append(f"![PSNR over total and planning, by method]({picture})")
    goals = goals_table(results)
    if goals:
        parts += [
            "**rd at equal totals**: as it comes, on its better schedule, against the best of all "
            "others, and the difference in dB, mean over clips ± its 95 % interval. *Planning "
            "paid* is the difference to that method where it has as much work in all, planning "
            "included, read off the straight line between its two nearest totals.",
            goals,
        ]
    parts += [*methods_tables(results), *schedules_tables(results), *planning_tables(results)]
    options = options_table(results)
    if options:
        parts += [
            "**Other options**: what each changes. rd with 128 samples, all rows of a block, is "
            "the bound.",
            options,
        ]
    judged = judged_table(results)
    if judged:
        parts += ["**What the clips show**, by the judge: shares of what was asked for.", judged]
    return "\n\n".join(part for part in parts if part)


def ceiling(results: Results) -> str:
    """How near two dense runs are."""
    found = {int(steps): one["by_jali"]["psnr"] for steps, one in results.told["dense"].items()}
    if not found:
        return ""
    if all(value >= 100 for value in found.values()):
        return "The dense run through jali is the stock run bit for bit."
    near = ", ".join(f"{value:.1f} dB in {steps} steps" for steps, value in sorted(found.items()))
    return f"Dense by jali's kernels differs from stock by what they round: {near}."


def reading(told: dict[str, Any]) -> str:
    """What the tables say, in sentences."""
    results = Results(told)
    makers: tuple[Callable[[Results, int], str | None], ...] = (
        schedule_sentence, rd_sentence, agreement_sentence, controls_sentence,
    )  # fmt: skip
    found = [make(results, steps) for make in makers for steps in results.steps]
    return "\n".join(f"- {sentence}" for sentence in found if sentence)


def schedule_sentence(results: Results, steps: int) -> str | None:
    """ESA's schedule against falling ones, both by entropy."""
    gains = []
    for total in results.totals(steps):
        own = {"method": "entropy", "total": total, "steps": steps}
        esa = best(results.some(schedule="esa", **own))
        falling = best(row for row in results.some(**own) if row["schedule"] != "esa")
        if esa and falling and is_fair(esa) and is_fair(falling):
            gains.append(
                f"{falling['psnr']:.1f} instead of {esa['psnr']:.1f} dB at {share(total)} "
                f"({difference(falling, esa)})"
            )
    if not gains:
        return None
    return f"**A falling schedule** instead of ESA's, by `entropy` in {steps} steps: {_and(gains)}."


def rd_sentence(results: Results, steps: int) -> str | None:
    found = []
    for total in results.totals(steps):
        own = results.better("rd", total, steps)
        other = None if own is None else results.best_other(own)
        if own is None or other is None or not (is_fair(own) and is_fair(other)):
            continue
        sure = "" if is_certain(own, other) or is_certain(other, own) else ", which may be chance"
        found.append(f"{difference(own, other)} dB at {share(total)} (`{other['method']}`{sure})")
    if not found:
        return None
    return f"**rd against the best other method**, {steps} steps, planning aside: {_and(found)}."


def agreement_sentence(results: Results, steps: int) -> str | None:
    """Whether other metrics order rd and the best other method as PSNR does."""
    found, unlike = [], []
    for total in GOALS:
        own = results.better("rd", total, steps)
        other = None if own is None else results.best_other(own)
        if own is None or other is None or not (is_fair(own) and is_fair(other)):
            continue
        if "lpips" not in own or "lpips" not in other:
            continue
        first = own["psnr"] > other["psnr"]
        found.append(f"{own['lpips']:.4f} and {other['lpips']:.4f} at {share(total)}")
        if (own["ssim"] > other["ssim"]) != first:
            unlike.append(f"SSIM at {share(total)}")
        if (own["lpips"] < other["lpips"]) != first:
            unlike.append(f"LPIPS at {share(total)}")
    if not found:
        return None
    agree = f"disagree: {_and(unlike)}" if unlike else "agree on which of the two is better"
    return f"**SSIM and LPIPS**, {steps} steps, {agree}; LPIPS is {_and(found)}."


def controls_sentence(results: Results, steps: int) -> str | None:
    """Which methods do not beat both controls, and where."""
    found, compared = [], 0
    for method in (m for m in results.methods if m not in CONTROLS):
        behind = []
        for total in results.totals(steps):
            row = results.better(method, total, steps)
            controls = [results.better(c, total, steps) for c in CONTROLS]
            if row is None or None in controls:
                continue
            compared += 1
            if row["psnr"] <= max(c["psnr"] for c in controls if c):
                behind.append(share(total))
        if behind:
            found.append(f"`{method}` at {_and(behind)}")
    if not compared:
        return None
    if not found:
        return f"**Every method beats both controls** at every total measured in {steps} steps."
    return f"**Behind a control** in {steps} steps: {_and(found)}."


def sentence(told: dict[str, Any]) -> str | None:
    """For the README: entropy, rd and the controls at 0.4, in the most steps measured."""
    results = Results(told)
    for steps in reversed(results.steps):
        at = {"total": 0.4, "steps": steps}
        esa = best(results.some(method="entropy", schedule="esa", **at))
        rd, entropy, *controls = (
            best(row for row in results.some(method=m, **at) if row["schedule"] != "esa")
            for m in ("rd", "entropy", *CONTROLS)
        )
        if esa is None or rd is None or entropy is None:
            continue
        lot = ""
        if None not in controls:
            lot = " Blocks drawn by lot or by nearness have {} and {}.".format(
                *(f"{row['psnr']:.1f}" for row in controls if row)
            )
        return (
            f"What skipping does to the picture depends on the schedule, the method and the model. "
            f"On `nano`, in {steps} steps and over {len(told['prompts'])} prompts that it never "
            f"saw, 0.4 of all attention work gives {esa['psnr']:.1f} dB against the dense run with "
            f"ESA's schedule and `entropy`. With budgets that fall along the run `entropy` has "
            f"{entropy['psnr']:.1f} and `rd` {rd['psnr']:.1f}; planning takes another "
            f"{entropy['planning']:.3f} and {rd['planning']:.3f}.{lot}"
        )
    return None


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
