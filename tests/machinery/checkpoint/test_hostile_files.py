"""What others put into a run's folder: links, pipes, odd content and manifests, escapes; and a second run in it."""

import json
import os
import shutil
import stat
from pathlib import Path

import disk
import pytest
import runs
import saves
import torch
from runs import outcome, run
from safetensors.torch import load_file, save_file
from saves import SMALL, log_of, names

from lib import config
from lib.utils import files
from lib.utils.checkpoint import shards, state, weights
from lib.utils.errors import UsageError, printable
from lib.utils.monitoring import console
from scripts import export, plot, status

pytestmark = pytest.mark.usefixtures("small_plugins")
ESCAPE = "\x1b[2J\x1b]0;owned\x07\u202e"
WEIGHTS = "best/weights.safetensors"

ODD = {  # what may stand in the place of a file; `there` is a file that must not change
    "link": lambda path, there: path.symlink_to(there),
    "dangling link": lambda path, there: path.symlink_to(there.parent / "nowhere"),
    "looping link": lambda path, there: path.symlink_to(path.name),
    "hard link": lambda path, there: path.hardlink_to(there),
    "pipe": lambda path, there: os.mkfifo(path),
    "socket": lambda path, there: os.mknod(path, stat.S_IFSOCK | 0o600),
    "folder": lambda path, there: path.mkdir(),
    "device": lambda path, there: path.symlink_to("/dev/zero"),
}


@pytest.fixture
def there(tmp_path):
    """Somebody's file."""
    file = tmp_path / "precious"
    file.write_text('{"state": "finished"}\n')
    yield file
    assert file.read_text() == '{"state": "finished"}\n' and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("kind", ODD)
def test_only_regular_files_are_opened_and_only_links_that_a_user_names_are_followed(kind, tmp_path, there):
    path = tmp_path / "x"
    ODD[kind](path, there)
    for mode in ("r", "r+", "a", "ab+", "xb"):
        if (kind, mode) != ("hard link", "r"):
            with pytest.raises(OSError, match="Errno"):
                files.open_regular(path, mode)
    if kind == "link":
        assert files.read_bytes(path, follow=True) == there.read_bytes()
    with pytest.raises(OSError, match="larger than 5 bytes"):
        files.read_bytes(there, most=5)


@pytest.mark.parametrize("name", ["few_norm_net/checkpoints", "few_norm_net/best", ".old"])
def test_a_run_does_not_start_over_a_link_in_place_of_a_folder_of_its_own(name, copy, there, refused):
    path = copy.parent / name
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(there.parent)
    before = sorted(there.parent.iterdir())
    assert f"{path})" in refused(f"{SMALL} -cpu 1 -reset", out=copy.parent)
    assert sorted(there.parent.iterdir()) == before


def test_files_that_are_replaced_are_replaced_whatever_stands_there(copy, there):
    kinds = {"outcome.json": "link", "config.yaml": "pipe", WEIGHTS: "hard link"}
    kinds["final/weights.safetensors"] = "device"
    for name, kind in kinds.items():
        (copy / name).unlink(missing_ok=True)
        ODD[kind](copy / name, there)
    shutil.rmtree(copy / "checkpoints")
    folder = run(copy.parent, f"{SMALL} -cpu 1 -epochs 1")
    assert outcome(folder)["state"] == "finished"
    for name in kinds:
        assert stat.S_ISREG((folder / name).lstat().st_mode) and (folder / name).stat().st_nlink == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to another user")
def test_the_folder_of_another_user_is_refused_unless_out_is_made_for_a_group(copy, tmp_path, refused):
    out = copy.parent
    os.chown(copy, 12345, -1)
    for mode in (0o755, 0o775, 0o2755, 0o777, 0o3777):
        out.chmod(mode)
        line = refused(f"{SMALL} -cpu 2", out=out)
        assert "belongs to user 12345" in line and f"chmod g+ws {out}" in line
    out.chmod(0o2775)
    run(out, f"{SMALL} -cpu 2")
    out.chmod(0o755)
    os.chown(copy, os.geteuid(), -1)
    other = tmp_path / "out"
    other.mkdir()
    (other / "few_norm_net").symlink_to(copy)
    run(other, f"{SMALL} -cpu 2")  # a link of my own, as to a larger disk
    run(other, f"{SMALL} -cpu 2 -reset")
    assert [*(copy.parent / ".old").iterdir()], "on that disk"
    os.lchown(other / "few_norm_net", 12345, -1)
    assert "belongs to user 12345" in refused(f"{SMALL} -cpu 2", out=other)


def another_run(folder: Path):
    shutil.rmtree(folder)
    (folder / "best").mkdir(parents=True)
    for name in (".lock", "outcome.json", WEIGHTS, "metrics.jsonl"):
        (folder / name).write_text("another run's")


def another_lock(folder: Path):
    (folder / ".lock").unlink()
    (folder / ".lock").write_text("another run's")


def moved_away(folder: Path):
    folder.rename(folder.with_name("moved"))


@pytest.mark.parametrize(
    ("seize", "seen_by"), [(another_run, "-save_every 1steps"), (another_lock, "-log_every 1"), (moved_away, "")]
)
def test_a_run_whose_folder_is_seized_or_moved_ends_and_writes_nothing_more(seize, seen_by, tmp_path, monkeypatch):
    def take(folder):
        seize(folder)
        taken.update(tree(folder))

    taken: dict = {}
    if not seen_by:  # but by the next vote
        monkeypatch.setattr(saves.preemption, "ASK_EVERY_S", 0.0)
    saves.after_step(monkeypatch, 5, take)
    reason = "another process has the run's folder" if seen_by else f"No such file or directory: '{tmp_path}/m/"
    with pytest.raises((OSError, RuntimeError), match=reason):
        runs.train.main([*f"{SMALL} {seen_by} -cpu 1 -model m -out {tmp_path}".split()])
    assert tree(tmp_path / "m") == taken and (tmp_path / "m").exists() == bool(seen_by)


def tree(folder: Path) -> dict:
    """The content of a folder, without logs."""
    return {name: content for name, content in disk.read_tree(folder).items() if not name.startswith("logs")}


def test_every_flipped_bit_of_a_weights_file_is_noticed(tmp_path):
    file = tmp_path / "x.safetensors"
    shards.write_weights(file, {"a.weight": torch.randn(3), "b": torch.tensor(True)})
    good, found = file.read_bytes(), shards.read_weights(file)
    assert load_file(file).keys() == found.keys() == {"a.weight", "b"}
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        try:
            same = runs.same_tensors(shards.read_weights(file), found)
        except shards.Damaged as error:
            same = str(file) in str(error)
        assert same, f"bit {bit} of {bytes(good[bit // 8 : bit // 8 + 1])}"


@pytest.mark.parametrize("damage", [lambda path: os.truncate(path, path.stat().st_size - 5), os.unlink])
def test_damaged_best_weights_are_named_by_all_who_read_them(damage, copy, finished_run, refused, capfd):
    file = copy / WEIGHTS
    damage(file)
    for call in (
        lambda: weights.load_into(str(copy), runs.norm_net(config.parse_args(["-num_classes", "4"]))),
        lambda: (weights.find(copy), shards.read_weights(file)),
    ):
        with pytest.raises((UsageError, shards.Damaged), match=str(file)):
            call()
    assert str(file) in refused(f"{SMALL} -model new -weights {copy}", out=copy.parent)
    assert "best" in refused(f"{SMALL} -eval", out=copy.parent)
    with pytest.raises(SystemExit) as end:
        export.main([str(copy), "-o", str(copy / "x.safetensors")])
    assert end.value.code == 2 and str(file) in capfd.readouterr().err
    run(copy.parent, f"{SMALL} -cpu 2")
    assert str(file) in log_of(copy) and "the next evaluation counts as the best" in log_of(copy)
    assert outcome(copy)["best"] is None and outcome(finished_run)["best"]


def test_a_newer_format_is_refused_and_a_run_whose_checkpoints_are_gone_does_not_begin_anew(copy, refused):
    before = names(copy)
    saves.change_manifest(copy / "checkpoints" / before[0], lambda manifest: {**manifest, "format": 9})
    line = refused(f"{SMALL} -cpu 2 -model few_norm_net", out=copy.parent)
    assert "is of format 9" in line and f"reads format {state.FORMAT}" in line and names(copy) == before
    shutil.rmtree(copy / "checkpoints")
    assert f"{copy}/checkpoints has no checkpoint, though" in refused(SMALL, out=copy.parent)
    run(copy.parent, f"{SMALL} -eval")
    (copy / "start.json").write_text("{")
    assert "start.json does not hold what the run's first" in refused(f"{SMALL} -cpu 1", out=copy.parent)


def test_checkpoints_with_values_that_are_not_finite_are_refused_unless_allowed(copy, refused):
    newest = copy / "checkpoints" / names(copy)[0]
    for shard in newest.glob("shard_*"):
        tensors = load_file(shard)
        if "model.5.bias" in tensors:
            tensors["model.5.bias"][2] = float("inf")
            save_file(tensors, shard)
            facts = {"bytes": shard.stat().st_size, "crc32": shards.zlib.crc32(shard.read_bytes())}
            saves.change_manifest(newest, lambda m, f=facts, s=shard: {**m, "shards": {**m["shards"], s.name: f}})
    for cpu in (1, 2):
        line = refused(f"{SMALL} -cpu {cpu} -model few_norm_net", out=copy.parent)
        assert "5.bias" in line and "not finite" in line and "-allow_change nan" in line
    run(copy.parent, f"{SMALL} -cpu 2 -model few_norm_net -allow_change nan")


LINES = [b"[]", b"5", b"null", b'{"step": "x"}', b'{"epoch": 1}', b"\xff\x00", b"{" * 10_000, b'{"step": 2, "a": []}']


def test_odd_lines_in_metrics_jsonl_keep_no_run_from_starting_and_are_one_row(copy):
    path = copy / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines(keepends=True)
    shutil.copytree(copy, copy.parent / "other")
    for odd in LINES:
        path.write_bytes(b"".join([first, odd + b"\n", *others]))
        rows = {row["run"]: row for row in status.rows(copy.parent, "best")}
        assert rows["few_norm_net"]["why"] == "metrics.jsonl: line 2 is none that a run writes", odd
        assert rows["few_norm_net"]["loss"] == rows["other"]["loss"] != ""
    odd = b"\n".join(LINES) + b"\n"
    path.write_bytes(b"".join([first, odd, *others]))
    run(copy.parent, f"{SMALL} -cpu 2")
    assert path.read_bytes().startswith(first + odd + others[0]), "what follows it stays"


OUTCOMES = [
    "[]",
    '{"state": ["x"], "best": [1]}',
    '{"state": "finished", "best": {"metric": "a", "value": "b", "score": "c"}}',
    '{"state": "failed", "reason": {"a": 1}, "best": 3}',
    '{"state": "finished", "best": {"metric": "a"}}',
    "{" * 100_000,
    "\0" * 50,
]


def test_one_odd_run_is_one_row_and_breaks_no_table(copy, capsys):
    for name in ("odd", "other"):
        shutil.copytree(copy, copy.parent / name)
    odd = copy.parent / "odd"
    saves.change_manifest(odd / "checkpoints" / names(copy)[0], lambda m: {**m, "state": [], "config": None})
    for text in OUTCOMES:
        (odd / "outcome.json").write_text(text)
        for by in status.SORTS:
            assert status.main([str(copy.parent), "-wide", "-by", by]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert len(lines) == 4 and sum("finished" in line for line in lines) >= 2, (text[:50], by)


def test_names_and_reasons_cannot_control_the_terminal(copy, tmp_path, capsys, monkeypatch):
    name = f"a{ESCAPE}\nb"
    facts = {**outcome(copy), "state": "failed", "reason": f"x{ESCAPE}", "host": ESCAPE}
    (copy / "outcome.json").write_text(json.dumps(facts))
    copy.rename(copy.parent / name)
    assert status.main([str(copy.parent)]) == 0
    for script in (plot, export):
        with pytest.raises(SystemExit):
            script.main([str(tmp_path / name)])
    assert runs.train.main(["-cfg", str(tmp_path / name)]) == 2
    console.setup_logging(tmp_path, rank=0)
    console.logging.getLogger("lib").warning("the class %s", ESCAPE)
    shown = "".join(capsys.readouterr()) + (tmp_path / "logs" / "rank_0.log").read_text()
    assert shown.count("\\x1b[2J") >= 6 and "\\u202e" in shown
    assert not [one for one in shown if not (one.isprintable() or one == "\n")]
    assert printable("Größe 日本 🎉\n\tx") == "Größe 日本 🎉\n\tx"
