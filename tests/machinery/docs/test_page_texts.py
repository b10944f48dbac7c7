"""What README.md and docs say: their commands, links, flags and names are right."""

import re
import shlex

import tiny_data
import torch
from pages import COMMANDS, FENCE, FILES, FORMS, PAGE_PLUGINS, PAGES, README
from processes import ROOT

import train
from lib import config
from scripts import flags_page, pack


def test_every_command_of_the_pages_has_a_known_form():
    assert len(COMMANDS) > 60
    assert [command for command in COMMANDS if not command.startswith((*FORMS, ". .venv/bin/activate"))] == []


def test_every_train_py_command_of_the_pages_can_be_parsed(tmp_path):
    tiny_data.make_folder(tmp_path / "photos")
    pack.main([f"{tmp_path}/photos", "-o", f"{tmp_path}/shards"])
    (tmp_path / "config.yaml").write_text("epochs: 3\n")
    shapes = {
        r"-cfg out/\S+": f"-cfg {tmp_path}/config.yaml",
        r"-data (data/photos|DIR)": f"-data {tmp_path}/photos",
        r"-data data/shards": f"-data {tmp_path}/shards",
        r"-data PATH": "-data lib",
        r"-data '?(s3|https)://\S+": f"-data {tmp_path}/shards",
        r"-image_size \S+": "",
    }
    for kind, instead in {"arch": "mlp", "dataset": "digits", "trainer": "trainer"}.items():
        shapes[rf"-{kind} ({'|'.join(PAGE_PLUGINS[kind])})\b"] = f"-{kind} {instead}"
    understood = 0
    for command in COMMANDS:
        parts = re.split(r"train\.py|train\.sbatch|train\.sh|elastic\.sh|doctor\.py", command)
        if len(parts) == 2 and not command.startswith("kubectl"):
            for shape, instead in shapes.items():
                parts[1] = re.sub(shape, instead, parts[1])
            if "-h" not in shlex.split(parts[1]):
                config.parse_args(shlex.split(parts[1]))
            understood += 1
    assert understood >= 40


def test_no_link_in_the_pages_is_dead():
    count = 0
    for name, page in PAGES.items():
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page):
            path, _, anchor = target.partition("#")
            file = (ROOT / name).parent / path if path else ROOT / name
            assert file.exists(), f"{name}: {target}"
            titles = re.findall(r"^#+ (.*)$", FENCE.sub("", file.read_text()), re.M) if anchor else [""]
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{name}: {target}"
            count += 1
    assert count > 60
    linked = {*re.findall(r"\]\(docs/(\w+\.md)", README)}
    linked |= {*re.findall(r"\]\((examples/\w+\.md)", PAGES["docs/extending.md"])}
    pages = {name.removeprefix("docs/") for name in PAGES if name.startswith("docs/")}
    assert linked == pages, "README.md links to every page, docs/extending.md to every example"


def test_the_page_of_flags_and_the_types_of_args_are_generated_from_the_parser():
    page, types = PAGES["docs/flags.md"], flags_page.STUB.read_text()
    assert (page, types) == (flags_page.page(), flags_page.stub()), "run python scripts/flags_page.py"
    assert "    max_hours: float | None\n    grace_s: float\n" in types
    shown = set(re.findall(r"^- `(-\w+)", page, re.M))
    assert shown >= {f"-{action.dest}" for action in config.new_parser()._actions if action.dest not in ("h", "help")}


def test_every_test_named_in_a_page_exists():
    texts = [file.read_text() for file in ROOT.glob("tests/**/test_*.py")]
    existing = set(re.findall(r"^def (test_\w+)", "\n".join(texts), re.M))
    named = {name for page in PAGES.values() for name in re.findall(r"`(test_\w+)`", page)}
    assert len(named) >= 10 and named <= existing, named - existing


def test_the_files_and_folders_named_in_the_pages_exist():
    for name in re.findall(r"^([\w./]+)  ", README.split("## Where things are")[1].split("```")[1], re.M):
        assert (ROOT / name).exists(), name
    for page, text in PAGES.items():
        for name in re.findall(r"`((?:lib|scripts|tests|docs|data)/[\w/.]+\w)`", text):
            made = name in FILES or name.endswith(("NAME.py", "my_net.py", "my_data.py"))
            assert made or (ROOT / name).exists(), f"{page}: {name}"


def test_every_flag_named_in_the_pages_exists():
    """A flag of train.py, of one of the plugins, or of a script."""
    files = [*ROOT.glob("lib/*/*.py"), *ROOT.glob("scripts/**/*.py"), *ROOT.glob("tests/machinery/docs/*.py")]
    others = set(re.findall(r'"(-\w+)"', "".join([*FILES.values(), *(file.read_text() for file in files)])))
    existing = {option for action in config.new_parser()._actions for option in action.option_strings} | others
    texts = [page for name, page in PAGES.items() if name != "CHANGELOG.md"]  # it also names removed flags
    codes = [code for page in texts for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", page))]
    named = set(re.findall(r"(?<![\w-])-[a-z]\w+", " ".join(codes)))
    assert len(named) > 60 and named <= existing, named - existing


def test_missing_gpus_and_a_missing_slurm_are_reported_in_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))  # as where there is no Slurm
    shown, refused, too_few = 0, 0, torch.cuda.device_count() < 3
    for command in sorted(set(COMMANDS)):
        flags = shlex.split(command)[2:] if command.startswith("python train.py") else []
        if "-slurm_dry" in flags and "my_data" not in flags:
            assert train.main([*flags, "-out", str(tmp_path / "out")]) == 0
            assert "#SBATCH --partition=general\n" in capfd.readouterr().out
            shown += 1
        elif "-slurm_dry" not in flags and ("-slurm" in flags or ("-gpus" in flags and too_few)):
            assert train.main(flags) == 2
            output = capfd.readouterr().err
            assert len(output.splitlines()) == 1 and output.startswith("train.py: -"), command
            refused += 1
    assert shown and refused
