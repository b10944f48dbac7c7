"""What others put into a run's folder: links, pipes, odd content and manifests, escapes; and a second run in it."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
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
from lib.utils.checkpoint import run_folder, shards, state, weights
from lib.utils.errors import UsageError, printable
from lib.utils.monitoring import console
from scripts import export, plot, reading, status

pytestmark = pytest.mark.usefixtures("small_plugins")
ESCAPE = "\x1b[2J\x1b]0;owned\x07\u202e"
MANIFEST, SHARD = "manifest.json", "shard_0000.safetensors"
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


def replace(path: Path, kind: str, there: Path):
    path.unlink(missing_ok=True)
    ODD[kind](path, there)


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


# What calls files.open_regular needs few of these kinds: all of them are tried above.


def test_a_run_does_not_start_over_a_lock_that_is_no_file_of_its_own(copy, there, refused):
    replace(copy / ".lock", "dangling link", there)
    kept = outcome(copy)
    line = refused(f"{SMALL} -cpu 1", out=copy.parent)
    assert "cannot be written" in line and str(copy / ".lock") in line
    assert outcome(copy) == kept


@pytest.mark.parametrize(("name", "kind"), [("metrics.jsonl", "hard link"), ("logs/rank_0.log", "link")])
def test_a_run_ends_at_what_is_no_file_of_its_own(name, kind, copy, there):
    replace(copy / name, kind, there)
    command = f"{SMALL} -cpu 1 -model {copy.name} -out {copy.parent}".split()
    with pytest.raises(OSError, match=str(copy / name)):
        runs.train.main(command)


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
        replace(copy / name, kind, there)
    shutil.rmtree(copy / "checkpoints")
    folder = run(copy.parent, f"{SMALL} -cpu 1 -epochs 1")
    assert outcome(folder)["state"] == "finished"
    for name in kinds:
        assert stat.S_ISREG((folder / name).lstat().st_mode) and (folder / name).stat().st_nlink == 1


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_cfg_file_or_weights_that_are_no_regular_file_are_refused(kind, tmp_path, there, refused):
    path = tmp_path / "x.safetensors"
    ODD[kind](path, there)
    with pytest.raises(UsageError, match="cannot be read"):
        config.parse_args(["-cfg", str(path)])
    assert "-weights" in refused(f"{SMALL} -weights {path}")


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
    os.lchown(other / "few_norm_net", 12345, -1)
    assert "belongs to user 12345" in refused(f"{SMALL} -cpu 2", out=other)


def another_run(folder: Path):
    """Put another run's folder in the place of one."""
    shutil.rmtree(folder)
    (folder / "best").mkdir(parents=True)
    for name in (".lock", "outcome.json", WEIGHTS, "metrics.jsonl"):
        (folder / name).write_text("another run's")


def another_lock(folder: Path):
    """Remove the lock alone, and let another run make its own."""
    (folder / ".lock").unlink()
    (folder / ".lock").write_text("another run's")


@pytest.mark.parametrize(("seize", "seen_by"), [(another_run, "-save_every 1steps"), (another_lock, "-log_every 1")])
def test_a_run_whose_folder_another_one_has_ends_and_writes_nothing_more(seize, seen_by, tmp_path, monkeypatch):
    def take(folder):
        seize(folder)
        taken.update(tree(folder))

    taken: dict = {}
    saves.after_step(monkeypatch, 5, take)
    with pytest.raises(OSError, match="another process has the run's folder"):
        runs.train.main([*f"{SMALL} {seen_by} -cpu 1 -model m -out {tmp_path}".split()])
    assert tree(tmp_path / "m") == taken


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


@pytest.mark.parametrize(
    "damage", [lambda path: os.truncate(path, path.stat().st_size - 5), os.unlink], ids=["cut", "missing"]
)
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


# Manifests whose checksum is right


def change(path: str, value):
    """A change of a manifest: the entry a.b.c gets this value, or is removed for `...`."""

    def changed(manifest):
        *places, last = (int(name) if name.isdigit() else name for name in path.split("/"))
        place = manifest
        for name in places:
            place = place[name]
        if value is ...:
            del place[last]
        else:
            place[last] = value

    return changed


FORGED = {
    f"{path} {value!r}"[:50]: change(path, value)
    for path, values in {
        "state": ([], None, "x", ...),
        "state/scaler": (["x"],),
        "state/other": (1,),
        "state/step": (-1, "x", 2.5, 1 << 60),
        "state/evaluated": ("x",),
        "state/best": ("x", {"metric": "loss"}, ...),
        "state/unlogged": ({"loss": ["x"]}, {"loss": 1.0}, 3),
        "states": (None, [], ...),
        "states/optim": (3, {}, [{"a": 1, "b": 2}, {}], [{"tensor": "nope"}, {"list": []}], [{"dict": []}]),
        "states/optim/0/dict": ([], 3),
        "states/optim/0/dict/0/1/dict/1": (["exp_avg", 3], ["other", {"tensor": "optim.1.weight.exp_avg"}]),
        "states/optim/1": (3, {"list": ["x"]}),
        "states/frozen": (3, [3]),
        "config/engine": ("../x", None),
        "config": ([], None, ...),
        "config/batch_size": (..., {}, 0),
        "tensors": ([], 3, ...),
        "tensors/model.1.weight": (["F32"], ["F33", [24, 64]], ["F32", [-1, 2]], 1),
        "tensors/optim.1.weight.exp_avg": (["F32", [1]], ["F32", [1, 1]], ["F16", [24, 64]], ["F32", [99, 99]], ...),
        "shards": ([], {}, ...),
        "shards/shard_0000.safetensors": (None, True, 3, {}, {"bytes": 3}, {"bytes": None, "crc32": 3}),
    }.items()
    for value in values
}
FORGED |= {
    f"a shard {path}": lambda manifest, path=path: manifest["shards"].update({path: {"bytes": 22, "crc32": 0}})
    for path in ("../../../precious", "/etc/passwd")
}


def test_a_forged_manifest_is_passed_over(copy):
    newest, before = names(copy)[:2]
    manifest = copy / "checkpoints" / newest / MANIFEST
    good = manifest.read_bytes()
    for what, change_of in FORGED.items():
        manifest.write_bytes(good)
        saves.change_manifest(manifest.parent, change_of)
        past = saves.found(copy)
        assert past.folder.name == before and newest in past.damaged[0] and "is left" not in past.damaged[0], what
    for body in (b"[", b'{"a": ' * 5000, b"nothing"):
        manifest.write_bytes(body + state.CHECKSUM_LINE % shards.zlib.crc32(body))
        assert saves.found(copy).folder.name == before, body[:10]


def test_a_newer_format_is_refused_with_its_version_and_stays_in_place(copy, refused):
    before = names(copy)
    saves.change_manifest(copy / "checkpoints" / before[0], lambda manifest: {**manifest, "format": 9})
    line = refused(f"{SMALL} -cpu 2 -model few_norm_net", out=copy.parent)
    assert "is of format 9" in line and f"reads format {state.FORMAT}" in line
    assert names(copy) == before


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


def test_files_with_a_valid_checksum_and_wrong_content_are_passed_over_and_no_code_is_executed(copy, tmp_path):
    newest, before = (copy / "checkpoints" / name for name in names(copy)[:2])
    mark, shard = tmp_path / "mark", newest / SHARD
    for write in (
        lambda: saves.payload(shard, mark),
        lambda: torch.save({"model.1.weight": saves.Payload(mark)}, shard),
        lambda: save_file({"other": torch.ones(3)}, shard),
        lambda: shard.write_bytes((2**60).to_bytes(8, "little") + b"{}"),
    ):
        write()
        facts = {"bytes": shard.stat().st_size, "crc32": shards.zlib.crc32(shard.read_bytes())}
        saves.change_manifest(newest, lambda m, f=facts: {**m, "shards": {**m["shards"], SHARD: f}})
        past = saves.found(copy)
        assert past.folder == before and re.search("header|its files lack a part of model", past.damaged[0])
    assert not mark.exists()


@pytest.mark.parametrize("odd", ["[]", '{"resume": 3}', "{"])
def test_a_run_that_was_killed_before_its_first_save_goes_on_with_what_it_settled_or_not_at_all(odd, copy, refused):
    shutil.rmtree(copy / "checkpoints")
    (copy / "start.json").write_text(odd)
    line = refused(f"{SMALL} -cpu 1", out=copy.parent)
    assert "start.json does not hold what the run's first start settled" in line
    run(copy.parent, f"{SMALL} -cpu 1 -reset -epochs 1")


def test_pipes_in_place_of_what_a_start_and_a_save_remove_are_removed(copy):
    for name in ("checkpoints/x.partial", "best/w.partial", "checkpoints/000000_step_0"):
        os.mkfifo(copy / name)
    folder = run(copy.parent, f"{SMALL} -cpu 1 -epochs 4 -allow_change epochs")
    assert outcome(folder)["epoch"] == 4
    assert not [path for path in folder.rglob("*") if not (path.is_file() or path.is_dir())]


# What is shown

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
            assert status.main([str(copy.parent), "-by", by]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert len(lines) == 4 and sum("finished" in line for line in lines) >= 2, (text[:50], by)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_table_waits_for_no_pipe_and_follows_no_link(kind, copy, there, capsys):
    shutil.copytree(copy, copy.parent / "other")
    for name in ("outcome.json", "metrics.jsonl", ".lock", "logs/rank_0.log"):
        replace(copy / name, kind, there)
    assert status.main([str(copy.parent), "-by", "seen"]) == 0
    assert "other" in capsys.readouterr().out
    assert reading.metrics(copy).fault and not reading.log(copy) and reading.is_locked(copy) is None


def test_names_and_reasons_cannot_control_the_terminal(copy, tmp_path, capsys, monkeypatch):
    name = f"a{ESCAPE}\nb"
    facts = {**outcome(copy), "state": "failed", "reason": f"x{ESCAPE}", "host": ESCAPE}
    (copy / "outcome.json").write_text(json.dumps(facts))
    copy.rename(copy.parent / name)
    assert status.main([str(copy.parent)]) == 0
    with pytest.raises(SystemExit):
        plot.main([str(tmp_path / name)])
    with pytest.raises(SystemExit):
        export.main([str(tmp_path / name)])
    assert runs.train.main(["-cfg", str(tmp_path / name)]) == 2
    console.setup_logging(tmp_path, rank=0)
    console.logging.getLogger("lib").warning("the class %s", ESCAPE)
    shown = "".join(capsys.readouterr()) + (tmp_path / "logs" / "rank_0.log").read_text()
    assert shown.count("\\x1b[2J") >= 6 and "\\u202e" in shown
    assert not [one for one in shown if not (one.isprintable() or one == "\n")]
    assert printable("Größe 日本 🎉\n\tx") == "Größe 日本 🎉\n\tx"


def test_a_traceback_and_the_owner_of_a_lock_cannot_control_the_terminal(copy, refused, monkeypatch, caplog):
    code = f"def main():\n  raise ValueError({ESCAPE!r})\nfrom lib.utils.errors import run_program\nrun_program(main)"
    done = subprocess.run([sys.executable, "-c", code], cwd=config.ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("ValueError: \\x1b[2J\\x1b]0;owned\\x07\\u202e\n")
    (copy / ".lock").write_text(json.dumps({"host": ESCAPE}))
    monkeypatch.setattr(run_folder, "WAIT_S", 0.1)
    monkeypatch.setattr(run_folder.RunFolder, "_take", lambda self: None)
    line = refused(f"{SMALL} -cpu 1 -grace_s 0.1", out=copy.parent)
    assert "in use by host \\x1b[2J" in line and "\x1b" not in line + caplog.text


def test_plot_draws_the_good_runs_and_names_what_it_leaves_out(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs uv pip install -r pyproject.toml --group plot")
    figures = {"step": 1, "val/loss": 2.0, "val/accuracy": 0.5}
    many = {**figures, **{f"val/m{number:04}": 1.0 for number in range(3000)}}
    texts = {"good": json.dumps(many), "odd": "[]", "empty": "", "huge": '{"step": 1, "a": ' + "9" * 400 + "}"}
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(f"{text}\n")
    file = tmp_path / "x.png"
    assert plot.main([str(tmp_path / name) for name in ("odd", "good", "huge", "empty")] + ["-o", str(file)]) == 0
    said = capsys.readouterr()
    assert f"{tmp_path / 'odd'}: metrics.jsonl: line 1 is none that a run writes" in said.err
    assert f"{tmp_path / 'empty'}: " in said.err
    assert "only 24 panels; left out: val/m0020, val/m0021, val/m0022, val/m0023 and 2976 more" in said.err
    assert file.exists() and said.out.endswith("1 run\n")
