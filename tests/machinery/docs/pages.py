"""README.md and the pages of docs: their texts, commands and files, and a fork that has these files."""

import re
import shlex
import sys
from pathlib import Path

from processes import CLEAN, ROOT, output_of

README = (ROOT / "README.md").read_text()
PATTERNS = ("*.md", "docs/**/*.md", "data/*.md", "scripts/*/*.md")
PAGES = {str(file.relative_to(ROOT)): file.read_text() for pattern in PATTERNS for file in ROOT.glob(pattern)}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
FILE = re.compile(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", re.S | re.M)
FILES = {name: text for page in PAGES.values() for name, text in FILE.findall(page)}
FORMS = (
    *("python train.py", "python scripts/", "./scripts/", "torchrun --", "HEAD=node1:29400 ", "sbatch -N", "srun -N"),
    *("uv pip install ", "pip install ", "python3 -m venv .venv", "tensorboard --logdir ", "docker build "),
    *("docker push ", "kubectl ", "pre-commit install"),
)
PAGE_PLUGINS = {  # plugins that the pages define or take from elsewhere, by kind
    "arch": "tiny my_net planar bert nano vision causal lora detector painter tagger pixelwise".split(),
    "dataset": "stripes my_data rings parity counting boxes saddle cifar10 rare above discs".split(),
    "trainer": "sure detection gan contrastive profiled auroc free focal miou layers mixup".split(),
}


def commands(page: str) -> list[str]:
    """The commands of a page: the lines of its shell blocks, and code in backticks that begins like a command."""
    lines = [line for kind, text in FENCE.findall(page) if kind == "sh" for line in text.splitlines()]
    inline = [code for code in re.findall(r"`([^`\n]+)`", FENCE.sub("", page)) if code.startswith(FORMS)]
    whole = [line.split(" #")[0].strip() for line in [*lines, *inline] if not line.startswith("#")]
    return [part for line in whole for part in line.split(" && ") if part]


COMMANDS = [command for page in PAGES.values() for command in commands(page)]


def run_command(folder, command, code=0, **variables):
    """The output of a command of a page, which must end with this exit code."""
    flags = shlex.split(command)
    flags[0] = {"python": sys.executable, "torchrun": str(Path(sys.executable).with_name("torchrun"))}[flags[0]]
    return output_of(flags, code, limit=800, cwd=folder, env={**CLEAN, **variables})
