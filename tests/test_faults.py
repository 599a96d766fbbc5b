"""Real faults: killed processes, full disks, a second launch, changed input. What is stored stays right, always.

Run as a script, this file is the process that imports everything once and then starts harvests by fork.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TAPS, broken, tiny_run
from test_harvest import SIDES, assert_same_store, same_shards, start, times, wait_for_shards

import headwright.data.store as store
from headwright.configs import UserError, dump
from headwright.configs.load import load_run
from headwright.data.harvest import harvest, harvest_side, main, open_side, store_path
from headwright.data.store import read_manifest

TMPFS = ["unshare", "-rm"]


def many_shards(model_dir: Path, chats: Path, runs: Path, check_disk: bool = True):
    """A run whose store has many small shards."""
    return tiny_run(
        model_dir,
        chats,
        runs,
        corpus={"sources": [{"path": str(chats)}], "held_out": 0.1, "max_length": 256},
        answers={"max_new_tokens": 12, "rows": 2},
        harvest={
            "taps": list(TAPS),
            "shard_mib": 0.001,
            "dtype": "bfloat16",
            "check_disk": check_disk,
        },
    )


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Path:
    """Enough prompts that most kills meet a harvest at work."""
    path = tmp_path_factory.mktemp("asked") / "chats.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(100)))
    return path


@pytest.fixture(scope="module")
def undisturbed(model_dir, asked, tmp_path_factory):
    """The same harvest, left alone."""
    run = many_shards(model_dir, asked, tmp_path_factory.mktemp("undisturbed"))
    harvest(run)
    return run


def check_same(one, two) -> None:
    """Both sides of two runs: the same documents and the same shards, byte for byte."""
    for side in SIDES:
        assert_same_store(store_path(one, side), store_path(two, side))
        same_shards(store_path(one, side), store_path(two, side))
        assert not list(store_path(two, side).glob(".*"))


# What the script does


def forked(config: Path, log: Path, rank: int = 0, world: int = 1, port: int = 0) -> int:
    """A harvest in a child of this process."""
    child = os.fork()
    if child:
        return child
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    code = 1
    try:
        main(["--config", str(config)])
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def two(config: Path, log: Path) -> list[int]:
    """Two processes that share a harvest."""
    port = free_port()
    return [forked(config, log, rank, 2, port) for rank in range(2)]


def reap(child: int) -> int:
    """Wait for a child; its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kills(config: Path, log: Path, count: int, seed: int) -> None:
    """Kill a harvest of two processes `count` times, then let it finish. Prints what happened."""
    chance, run = random.Random(seed), load_run(config)
    root, working, codes = store_path(run, "train"), 0, []
    for _ in range(count):
        processes = two(config, log)
        wanted, limit = len(list(root.glob("shard-*"))) + chance.randint(0, 5), time.monotonic() + 60
        if chance.random() < 0.7:  # while it is at work; else at any moment, mostly before
            while len(list(root.glob("shard-*"))) < wanted and not read_complete(root) and time.monotonic() < limit:
                time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05) if chance.random() < 0.7 else chance.uniform(0, 1.5))
        chance.shuffle(processes)
        os.kill(processes[0], signal.SIGKILL)
        if chance.random() < 0.5:  # the other goes on alone for a while
            time.sleep(chance.uniform(0, 0.3))
        os.kill(processes[1], signal.SIGKILL)
        codes += [reap(process) for process in processes]
        working += not read_complete(root)
        if read_complete(root):  # nothing left to interrupt: begin again
            for side in SIDES:
                shutil.rmtree(store_path(run, side))
    codes += [reap(process) for process in two(config, log)]
    print(json.dumps({"codes": codes, "working": working}))


def read_complete(root: Path) -> bool:
    """Whether a store is finished. Its manifest may be read at any moment: it is whole or absent."""
    return (root / "manifest.json").exists() and read_manifest(root).complete


def disk(config: Path, log: Path, keep: Path) -> None:
    """Harvest onto a small disk that fills up, then onto the same with room. Prints what was seen."""
    run = load_run(config)
    place = Path(run.runs)
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        print("{}")
        return
    seen = {"full": reap(forked(config, log)), "again": reap(forked(config, log))}
    root = store_path(run, "train")
    seen["scratch"] = [path.name for path in place.rglob("*.tmp")]
    seen["damage"] = [
        path.name for path in root.glob("shard-*") if store.Shard.expected_size(path) != path.stat().st_size
    ]
    before = {path.name: path.stat().st_mtime_ns for path in root.glob("shard-*")}
    seen["shards"] = len(before)
    subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
    seen["room"] = reap(forked(config, log))
    seen["made again"] = [name for name, when in before.items() if (root / name).stat().st_mtime_ns != when]
    shutil.copytree(run.directory, keep / run.name)
    print(json.dumps(seen))


# The tests


def script(*arguments: str, prefix: tuple[str, ...] = ()) -> dict:
    """This file, run as a script: what it printed last."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    command = [*prefix, sys.executable, __file__, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def write_config(run, folder: Path) -> Path:
    """The run file."""
    path = folder / "run.yaml"
    path.write_text(dump(run))
    return path


@pytest.mark.parametrize("count", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_harvest_of_two_processes_survives_any_kill(model_dir, asked, undisturbed, tmp_path, count):
    run = many_shards(model_dir, asked, tmp_path / "runs")
    log = tmp_path / "log"
    seen = script("kills", write_config(run, tmp_path), log, count, 0)
    *killed, one, other = seen["codes"]
    assert (one, other) == (0, 0), log.read_text()[-3000:]
    assert killed.count(-signal.SIGKILL) >= count
    assert set(killed) <= {-signal.SIGKILL, 0}, log.read_text()[-3000:]
    assert seen["working"] >= count // 2  # most kills met it at work
    check_same(undisturbed, run)


def test_full_disk_is_told_and_nothing_is_lost(model_dir, asked, undisturbed, tmp_path):
    if shutil.which("unshare") is None or subprocess.run([*TMPFS, "true"], capture_output=True).returncode:
        pytest.skip("a small disk needs user namespaces (unshare -rm)")
    (tmp_path / "small").mkdir()
    (tmp_path / "kept").mkdir()
    run = many_shards(model_dir, asked, tmp_path / "small", check_disk=False)
    log = tmp_path / "log"
    seen = script("disk", write_config(run, tmp_path), log, tmp_path / "kept", prefix=tuple(TMPFS))
    if not seen:
        pytest.skip("a tmpfs cannot be mounted here")
    text = log.read_text()
    assert (seen["full"], seen["again"], seen["room"]) == (28, 28, 0), text[-3000:]
    assert text.count("error: the disk is full: free some space") == 2
    assert "Traceback" not in text
    assert seen["shards"] > 2
    assert (seen["scratch"], seen["damage"], seen["made again"]) == ([], [], [])
    kept = many_shards(model_dir, asked, tmp_path / "kept", check_disk=False)
    check_same(undisturbed, kept)


def test_disk_that_is_too_small_is_refused_with_the_numbers(model_dir, asked, tmp_path, monkeypatch, capsys):
    run = many_shards(model_dir, asked, tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=1 << 10))
    with pytest.raises(SystemExit) as caught:
        main(["--config", str(write_config(run, tmp_path))])
    errors = capsys.readouterr().err
    assert caught.value.code == 2
    assert "GiB are free" in errors
    assert "harvest.check_disk=false" in errors
    assert not list(tmp_path.rglob("shard-*"))


def test_what_is_there_counts_as_room(model_dir, asked, undisturbed, tmp_path, monkeypatch):
    """A disk that holds the finished store already needs no more."""
    usage = shutil.disk_usage(tmp_path)
    run = many_shards(model_dir, asked, tmp_path)
    shutil.copytree(undisturbed.directory, run.directory)
    free = sum(path.stat().st_size for path in run.directory.rglob("shard-*"))
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=free))
    before = times(run)
    harvest(run)
    assert times(run) == before


def test_second_launch_is_refused_and_the_first_goes_on(model_dir, asked, undisturbed, tmp_path, capsys):
    run = many_shards(model_dir, asked, tmp_path / "runs")
    process = start(run, tmp_path)
    wait_for_shards(process, store_path(run, "train"), 1)
    process.send_signal(signal.SIGSTOP)  # so that it is still at work
    try:
        before = times(run)
        with pytest.raises(SystemExit) as caught:
            main(["--config", str(tmp_path / "run.yaml")])
        assert caught.value.code == 2
        assert "another harvest is at work there" in capsys.readouterr().err
        assert times(run) == before
    finally:
        process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    check_same(undisturbed, run)
    harvest(run)  # the lock went with its process


@pytest.mark.parametrize("change", ["edited", "shortened", "reordered"])
def test_changed_input_is_refused(model_dir, asked, tmp_path, change):
    path = tmp_path / "chats.jsonl"
    lines = asked.read_text().splitlines()[:30]
    path.write_text("\n".join(lines))
    run = many_shards(model_dir, path, tmp_path)
    harvest(run)
    before = times(run)
    victim = store_path(run, "train") / "shard-00001.safetensors"
    victim.unlink()
    del before[str(victim)]
    changed = {"edited": [lines[0].replace("0", "zero"), *lines[1:]], "shortened": lines[:-1], "reordered": lines[::-1]}
    path.write_text("\n".join(changed[change]))
    with pytest.raises(UserError, match="features of another run: corpus was"):
        harvest(run)
    assert times(run) == before
    path.write_text("\n".join(lines))
    harvest(run)
    assert broken(store_path(run, "train")) == []


def test_two_processes_may_finish_at_once(model_dir, chats, tmp_path, monkeypatch):
    """One is writing the index when the other, which has nothing left to do, finishes, too."""
    from headwright.data.corpus import read_corpus
    from headwright.data.target import Target

    run = tiny_run(model_dir, chats, tmp_path)
    corpus, target = read_corpus(run.corpus, run.seed), Target.load(run.target, run.harvest.taps)
    original, entered = store.save_file, []

    def work(rank: int) -> None:
        state = type("State", (), {"is_main_process": rank == 0, "process_index": rank, "num_processes": 2})
        harvest_side(run, target, open_side(run, target, "train", corpus.train), state)

    def save(tensors, path, metadata=None):
        original(tensors, path, metadata)
        if path.name.startswith(".index") and not entered:
            entered.append(path)
            work(0)

    work(0)
    monkeypatch.setattr(store, "save_file", save)
    work(1)
    assert entered
    assert read_manifest(store_path(run, "train")).complete


if __name__ == "__main__":
    what, config, log, *rest = sys.argv[1:]
    if what == "kills":
        kills(Path(config), Path(log), *map(int, rest))
    else:
        disk(Path(config), Path(log), Path(rest[0]))
