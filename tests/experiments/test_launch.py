"""Sweeps on this machine and on a real Slurm: one array, whatever happens to its jobs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fake
import pytest
from fake import Slowly, eventually

from jali.experiments import launch as launching
from jali.experiments.cluster import Cluster, LaunchError, LocalCluster, SlurmCluster
from jali.experiments.collect import collect
from jali.experiments.job import OtherSettingsError
from jali.experiments.launch import launch
from jali.experiments.lock import HeldError, holder
from jali.experiments.resources import Resources
from jali.experiments.results import Results
from jali.experiments.slurm import SlurmSilentError, slurm_jobs
from jali.experiments.status import Status, read_status
from jali.experiments.submission import read_submissions
from jali.experiments.sweep import Sweep, parse_sweep

SWEEP = """
name: s
models: [nano]
methods: [entropy]
budgets: [0.5, 0.3]
resources: {gpus: 1, cpus_per_task: 1, mem: 500MB, time: "5"}
"""
LARGER = SWEEP.replace("[entropy]", "[entropy, psa]")
WHERE = ["local", "slurm"]
# For what is decided before a cluster is asked, or after it has answered: once is enough.
mostly_local = pytest.mark.parametrize(
    "make", ["local", pytest.param("slurm", marks=pytest.mark.slow)], indirect=True
)
Make = Callable[..., Cluster]


@pytest.fixture
def sweep() -> Sweep:
    return parse_sweep(SWEEP)


@pytest.fixture(params=WHERE)
def make(request: pytest.FixtureRequest, results: Results) -> Iterator[Make]:
    """A cluster of either kind. What a test leaves running there is ended."""
    where = request.param
    if where == "slurm":
        request.getfixturevalue("slurm")

    def made(name: str = "s", parallel: int = 2) -> Cluster:
        resources = Resources(1, 1, "500MB", "5")
        if where == "slurm":
            return SlurmCluster(results.sweep(name) / "jobs", resources, parallel, name)
        return LocalCluster(results.sweep(name) / "jobs", resources, parallel)

    yield made
    with contextlib.suppress(SlurmSilentError):
        launching.cancel(results, results.tags())


def states(results: Results, sweep: Sweep) -> list[str]:
    return [row.state for row in read_status(results, sweep.tags)]


@contextlib.contextmanager
def background(call: Callable[[], object]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    yield thread
    thread.join(90)
    assert not thread.is_alive()


def units(results: Results) -> list[tuple[str, str, int]]:
    return fake.ran(results.root)


def test_a_sweep_runs_to_its_end(results: Results, make: Make) -> None:
    seen: list[list[Status]] = []
    sweep = parse_sweep(LARGER)
    rows = launch(
        sweep, results, make(), fake.stages, on_status=lambda r: seen.append(list(r)), every=0.3
    )
    assert [row.state for row in rows] == ["done"] * 4
    assert len(units(results)) == len(set(units(results))) == 4 * 4 * fake.UNITS
    assert {row.submitted for row in rows} == {1}
    assert any(row.state in ("running", "queued") for row in seen[0])
    assert results.find_tags(["s"]) == list(sweep.tags)
    assert collect(results, sweep.tags).left_out == {}
    if make().where == "slurm":  # one array for all
        numbers = [read_submissions(results, tag)[0].job for tag in sweep.tags]
        main = numbers[0].partition("_")[0]
        assert numbers == [f"{main}_{i}" for i in range(4)]


@mostly_local
def test_a_finished_sweep_is_left_alone(results: Results, sweep: Sweep, make: Make) -> None:
    launch(sweep, results, make(), fake.stages, every=0.3)
    before = units(results)
    rows = launch(sweep, results, make(), fake.stages, every=0.3)
    other = parse_sweep(SWEEP + "seed: 7")
    with pytest.raises(OtherSettingsError, match="seed 0, now 7"):
        launch(other, results, make(), fake.stages, every=0.3)
    assert units(results) == before
    assert {row.submitted for row in rows} == {1}


def test_a_killed_job_is_tried_again_and_counted_once(
    results: Results, sweep: Sweep, make: Make
) -> None:
    fake.trouble(results.root, sweep.tags[1], "quality-1", "kill")
    rows = launch(sweep, results, make(), fake.stages, every=0.3)
    assert [row.state for row in rows] == ["done"] * 2
    assert [row.submitted for row in rows] == [1, 2]
    assert units(results).count((sweep.tags[1], "quality", 1)) == 2
    assert units(results).count((sweep.tags[1], "quality", 0)) == 1
    table = collect(results, [*sweep.tags, *sweep.tags])
    assert [row["tag"] for row in table.rows] == sorted(sweep.tags)


@mostly_local
def test_tries_are_bounded(results: Results, sweep: Sweep, make: Make) -> None:
    fake.trouble(results.root, sweep.tags[0], "benchmark-0", "raise", times=99)
    rows = launch(sweep, results, make(), fake.stages, max_attempts=2, every=0.3)
    assert [row.state for row in rows] == ["failed", "done"]
    assert rows[0].submitted == 2
    assert "told to fail" in rows[0].why
    submitted, spent = launching.retry(
        results, sweep.tags, lambda *_: make(), fake.stages, max_attempts=2, every=0.3
    )
    assert (submitted, spent) == ([], [sweep.tags[0]])


def test_a_cancelled_job_stays_cancelled_until_it_is_retried(
    results: Results, sweep: Sweep, make: Make
) -> None:
    victim = sweep.tags[0]
    fake.trouble(results.root, victim, "benchmark-1", "hang")
    with background(lambda: launch(sweep, results, make(), fake.stages, every=0.3)):
        eventually(lambda: (victim, "benchmark", 1) in units(results))
        assert launching.cancel(results, [victim]) == [victim]
    assert states(results, sweep) == ["cancelled", "done"]
    assert not results.lock(victim).exists()
    submitted, _ = launching.retry(
        results, sweep.tags, lambda *_: make(), fake.stages, wait=True, every=0.3
    )
    assert submitted == [victim]
    assert states(results, sweep) == ["done"] * 2
    assert units(results).count((victim, "calibrate", 0)) == 1


def test_a_cancellation_is_not_lost_on_a_job_that_is_just_starting(
    results: Results, sweep: Sweep
) -> None:
    fake.trouble(results.root, sweep.tags[0], "calibrate-0", "hang")
    cluster = LocalCluster(results.sweep("s") / "jobs", sweep.resources, 2)
    with background(lambda: launch(sweep, results, cluster, fake.stages, every=0.1)):
        eventually(lambda: read_submissions(results, sweep.tags[0]), every=0.01)
        launching.cancel(results, sweep.tags)
    assert states(results, sweep) == ["cancelled"] * 2
    assert {row.submitted for row in read_status(results, sweep.tags)} <= {0, 1}


def test_what_still_waits_can_be_cancelled(results: Results, sweep: Sweep, make: Make) -> None:
    fake.trouble(results.root, sweep.tags[0], "calibrate-0", "hang")
    with background(lambda: launch(sweep, results, make(parallel=1), fake.stages, every=0.3)):
        eventually(lambda: (sweep.tags[0], "calibrate", 0) in units(results))
        launching.cancel(results, sweep.tags)
    assert states(results, sweep) == ["cancelled"] * 2
    assert len(units(results)) == 1


@mostly_local
def test_the_second_launch_is_refused(results: Results, sweep: Sweep, make: Make) -> None:
    fake.trouble(results.root, sweep.tags[0], "calibrate-0", "hang")
    with background(lambda: launch(sweep, results, make(), fake.stages, every=0.3)):
        eventually(lambda: (sweep.tags[0], "calibrate", 0) in units(results))
        with pytest.raises(HeldError, match=rf"the sweep s is held by .*process {os.getpid()}"):
            launch(sweep, results, make(), fake.stages, every=0.3)
        launching.cancel(results, [sweep.tags[0]])
    assert {row.submitted for row in read_status(results, sweep.tags)} == {1}


def test_the_second_launch_after_the_first_has_left(
    results: Results, sweep: Sweep, slurm: Path  # noqa: ARG001
) -> None:  # fmt: skip
    def cluster() -> SlurmCluster:
        return SlurmCluster(results.sweep("s") / "jobs", sweep.resources, 2, "s")

    launch(sweep, results, cluster(), Slowly(0.5), wait=False)
    assert set(states(results, sweep)) <= {"queued", "running"}
    with pytest.raises(LaunchError, match=r"2 of the 2 experiments of s are still"):
        launch(sweep, results, cluster(), Slowly(0.5), wait=False)
    eventually(lambda: states(results, sweep) == ["done"] * 2, 60)
    assert len(units(results)) == len(set(units(results)))


def test_a_launcher_that_dies_takes_nothing_with_it(
    results: Results, sweep: Sweep, make: Make, tmp_path: Path
) -> None:
    code = f"""
import fake
from pathlib import Path
from jali.experiments.cluster import *
from jali.experiments.launch import *
from jali.experiments.sweep import parse_sweep
results = Results({str(results.root)!r}, {str(results.logs)!r})
cluster = {type(make()).__name__}(
    results.sweep("s") / "jobs", Resources(1, 1, "500MB", "5"),
    2)
launch(parse_sweep({SWEEP!r}), results, cluster, fake.Slowly(0.1), every=0.2)
"""
    with (tmp_path / "said").open("wb") as said:
        first = subprocess.Popen([sys.executable, "-c", code], stdout=said, stderr=said)
    eventually(lambda: len(units(results)) > 2)
    first.kill()
    first.wait()
    eventually(lambda: not any(row.alive for row in read_status(results, sweep.tags)), 60)
    rows = launch(sweep, results, make(), Slowly(0.1), every=0.3)
    assert [row.state for row in rows] == ["done"] * 2
    assert len(units(results)) == len(set(units(results)))


@pytest.fixture(params=["in the foreground", "in the background"])
def _ground(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a script puts into the background ignores Ctrl-C, and so do its children."""
    deaf = request.param == "in the background"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ground")
def test_leaving_ends_what_runs_here(results: Results, sweep: Sweep) -> None:
    fake.trouble(results.root, sweep.tags[0], "calibrate-0", "hang")

    def leave(rows: object) -> None:  # noqa: ARG001
        if units(results):
            raise KeyboardInterrupt

    cluster = LocalCluster(results.sweep("s") / "jobs", sweep.resources, 1)
    with pytest.raises(KeyboardInterrupt):
        launch(sweep, results, cluster, fake.stages, on_status=leave, every=0.1)
    assert not any(row.alive for row in read_status(results, sweep.tags))
    owner = holder(results.lock(sweep.tags[0]))
    assert owner is None or not owner.alive()
    rows = launch(sweep, results, cluster, fake.stages, every=0.3)
    assert [row.state for row in rows] == ["done"] * 2


def test_too_few_gpus_for_the_ranks(results: Results) -> None:
    text = SWEEP + "context_parallel: 2\ncalibrate: false"
    with pytest.raises(ValueError, match=r"runs on 2 ranks.*--gpus 2"):
        launch(parse_sweep(text), results, LocalCluster(results.root, Resources()), fake.stages)
    assert not results.tags()


# What only a cluster can do


def slurm_cluster(results: Results, sweep: Sweep, **options: str) -> SlurmCluster:
    resources = Resources.from_dict(sweep.resources.to_dict() | options)
    return SlurmCluster(results.sweep("s") / "jobs", resources, 2, "s")


def test_scancel_behind_our_back(results: Results, sweep: Sweep, slurm: Path) -> None:  # noqa: ARG001
    """submitit would wait forever: there is no accounting database to ask."""
    victim = sweep.tags[0]
    fake.trouble(results.root, victim, "quality-0", "hang")
    with background(
        lambda: launch(sweep, results, slurm_cluster(results, sweep), fake.stages, every=0.3)
    ):
        eventually(lambda: (victim, "quality", 0) in units(results))
        subprocess.run(["scancel", read_submissions(results, victim)[0].job], check=True)
    (row, *rest) = read_status(results, sweep.tags)
    assert row.state == "cancelled"
    assert row.submitted == 1
    assert {r.state for r in rest} == {"done"}


def test_a_requeued_job_goes_on(results: Results, sweep: Sweep, slurm: Path) -> None:  # noqa: ARG001
    """As after pre-emption: Slurm ends the job and starts it again under the same number."""
    victim = sweep.tags[0]
    fake.trouble(results.root, victim, "quality-1", "hang")
    with background(
        lambda: launch(sweep, results, slurm_cluster(results, sweep), fake.stages, every=0.3)
    ):
        eventually(lambda: (victim, "quality", 1) in units(results))
        number = read_submissions(results, victim)[0].job
        subprocess.run(["scontrol", "requeue", number], check=True)
        # Slurm holds a requeued job back for a while; nobody needs to wait for all of that. Within
        # the same second, though, it would take the new start for the one it has just revoked.
        eventually(lambda: slurm_jobs()[number].waiting)
        time.sleep(2)
        subprocess.run(
            ["scontrol", "update", f"JobId={number}", "StartTime=now"],
            check=False, capture_output=True,
        )  # fmt: skip
        eventually(lambda: units(results).count((victim, "quality", 1)) == 2, 150)
    rows = read_status(results, sweep.tags)
    assert [row.state for row in rows] == ["done"] * 2
    assert rows[0].submitted == 1  # nothing was submitted twice
    assert rows[0].attempts == 2
    assert units(results).count((victim, "benchmark", 0)) == 1


def test_the_node_goes_and_comes_back(results: Results, sweep: Sweep, slurm: Path) -> None:
    if not os.access(os.environ.get("SLURM_CONF", ""), os.W_OK):
        pytest.skip("this Slurm is not ours to stop")
    with background(
        lambda: launch(sweep, results, slurm_cluster(results, sweep), Slowly(0.3), every=0.3)
    ):
        eventually(lambda: len(units(results)) > 1)
        subprocess.run([slurm, "node-down"], check=True, capture_output=True)
        time.sleep(2)
        assert not any(row.state in ("lost", "failed") for row in read_status(results, sweep.tags))
        subprocess.run([slurm, "node-up"], check=True, capture_output=True)
    assert states(results, sweep) == ["done"] * 2
    assert len(units(results)) == len(set(units(results)))


def test_a_silent_slurm_is_not_taken_for_an_answer(
    results: Results,
    sweep: Sweep,
    slurm: Path,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    fake.trouble(results.root, sweep.tags[0], "quality-0", "hang")
    launch(sweep, results, slurm_cluster(results, sweep), fake.stages, wait=False)
    eventually(lambda: (sweep.tags[0], "quality", 0) in units(results))
    eventually(lambda: states(results, sweep)[1] == "done", 60)
    silent = tmp_path / "silent"
    silent.mkdir()
    for name in ("squeue", "scancel", "scontrol"):
        (silent / name).write_text(
            "#!/bin/sh\necho 'Unable to contact the controller' >&2\nexit 1\n"
        )
        (silent / name).chmod(0o755)
    before = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{silent}:{before}")
    (row, *rest) = read_status(results, sweep.tags)
    assert row.state == "running"
    assert {r.state for r in rest} == {"done"}
    with pytest.raises(SlurmSilentError):
        launching.cancel(results, [sweep.tags[0]])
    monkeypatch.setenv("PATH", before)
    launching.cancel(results, [sweep.tags[0]])
    eventually(lambda: states(results, sweep)[0] == "cancelled")


def test_a_killed_process_on_slurm_is_seen_at_once(
    results: Results, sweep: Sweep, slurm: Path  # noqa: ARG001
) -> None:  # fmt: skip
    victim = sweep.tags[0]
    fake.trouble(results.root, victim, "report-0", "hang")
    launch(sweep, results, slurm_cluster(results, sweep), fake.stages, wait=False)
    eventually(lambda: (victim, "report", 0) in units(results))
    owner = holder(results.lock(victim))
    assert owner is not None
    assert owner.job is not None
    os.kill(owner.pid, signal.SIGKILL)
    eventually(lambda: states(results, sweep)[0] == "failed")
    assert "exit code" in read_status(results, [victim])[0].why
    launching.retry(
        results,
        sweep.tags,
        lambda *_: slurm_cluster(results, sweep),
        fake.stages,
        wait=True,
        every=0.3,
    )
    assert states(results, sweep) == ["done"] * 2


def test_what_sbatch_refuses_is_one_sentence(results: Results, sweep: Sweep, slurm: Path) -> None:  # noqa: ARG001
    cluster = slurm_cluster(results, sweep, partition="nowhere")
    with pytest.raises(LaunchError, match=r"sbatch refused the jobs: .*partition") as error:
        launch(sweep, results, cluster, fake.stages)
    assert "\n" not in str(error.value)
    assert states(results, sweep) == ["waiting"] * 2
    assert not (results.sweep("s") / "lock.json").exists()


def test_the_script_asks_for_what_was_asked(results: Results) -> None:
    resources = Resources(partition="gpu", account="me")
    script = SlurmCluster(results.root, resources, 16, "big").script(72)
    for line in (
        "--array=0-71%16", "--gres=gpu:1", "--cpus-per-task=8", "--mem=65536MB", "--time=360",
        "--partition=gpu", "--account=me", "--job-name=jali-big", "--requeue",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
