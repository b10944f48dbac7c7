"""Merges a later version of the template into a project that scripts/new.py made: for `new.py update`.

The branch `template` holds the template as it was generated for this project, a commit for each version. The
project's own branches descend from it. So an update generates the new version with the recorded choices, commits it
there, and lets Git merge that branch: its three-way merge knows what the template changed and what you did.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHOICES = ".template.json"  # the project's name, and the parts that were chosen
BRANCH = "template"
MARK = "Generated-by: scripts/new.py project"  # in the message of each commit of the branch
COMMITTER = "template@localhost"  # of these commits: who amends, rebases or squashes one is another
IDENTITY = {f"GIT_{who}_{what}": COMMITTER for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def merge(source: str) -> int:
    """Merge the template of a folder or Git URL into this branch; return 0, or 1 for conflicts. Raises ValueError."""
    if not (ROOT / CHOICES).is_file():
        raise ValueError(f"no {CHOICES} here: only a project that new.py project made can be updated")
    if git(ROOT, "rev-parse", "--show-prefix"):
        raise ValueError(f"{ROOT} is a folder of a larger Git repository: only one of its own can be updated")
    if (merging := ROOT / git(ROOT, "rev-parse", "--git-path", "MERGE_HEAD")).exists():
        raise ValueError("a merge is not finished: git commit ends it, git merge --abort undoes it")
    if git(ROOT, "status", "--porcelain", "--untracked-files=no"):
        raise ValueError("there are changes that are not committed: commit or stash them first")
    if f"branch refs/heads/{BRANCH}" in git(ROOT, "worktree", "list", "--porcelain").splitlines():
        raise ValueError(f"the branch {BRANCH} is checked out, which is new.py's own: switch to another one")
    last = newest_version()
    mine, theirs = ({*git(ROOT, "rev-list", "--max-parents=0", one).split()} for one in ("HEAD", last))
    if not mine & theirs:
        hint = (
            f"git fetch --unshallow; if it has all of it: git merge -s ours --allow-unrelated-histories {last[:12]}"
        )
        raise ValueError(f"this branch does not begin with the template as generated (amended? shallow?): {hint}")
    with tempfile.TemporaryDirectory() as place:
        template, made = find_template(source, Path(place)), Path(place, "made")
        command = [sys.executable, template / "scripts" / "new.py", "project", made, "-like", ROOT / CHOICES]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise ValueError(f"{source}: its new.py failed: {(run.stderr.strip() or 'no message').splitlines()[-1]}")
        git(ROOT, "fetch", "--quiet", str(made), BRANCH)
    if git(ROOT, "diff", "--name-only", last, "FETCH_HEAD"):
        message = git(ROOT, "log", "-1", "--format=%B", "FETCH_HEAD")
        last = git(ROOT, "commit-tree", "FETCH_HEAD^{tree}", "-p", last, "-m", message)
    git(ROOT, "update-ref", f"refs/heads/{BRANCH}", last)
    return merge_branch(merging)


def newest_version() -> str:
    """Return the newest commit that holds the template as generated, in a branch of this name or in this history."""
    known = ("HEAD", f"--branches={BRANCH[:-1]}[{BRANCH[-1]}]", f"--remotes=*/{BRANCH}")  # a name alone is no pattern
    wanted = (f"--grep=^{MARK}$", f"--committer=<{COMMITTER}>")  # both
    found = git(ROOT, "rev-list", "--topo-order", "--max-count=1", *wanted, *known)
    if not (found := found or git(ROOT, "rev-list", "--max-count=1", wanted[0], known[1])):  # of an older new.py
        raise ValueError(f"no version of the template in this repository: git fetch origin {BRANCH}:{BRANCH}")
    return found


def find_template(source: str, place: Path) -> Path:
    """Return the folder of the template; that of a Git URL is cloned into `place`."""
    folder = Path(source).resolve()
    if not (folder / "train.py").is_file():
        folder = place / "template"
        try:
            git(Path.cwd(), "clone", "-c", "core.autocrlf=false", "--quiet", "--depth=1", "--", source, str(folder))
        except ValueError as error:
            raise ValueError(f"{source}: no folder or Git URL of the template: {error}") from None
    if not (folder / "scripts" / "project.py").is_file():
        raise ValueError(f"{source}: not the template: it has no scripts/project.py")
    return folder


def merge_branch(merging: Path) -> int:
    """Merge the branch, and print what Git says. Returns the exit code."""
    run = subprocess.run(["git", "merge", "--no-edit", "--ff", BRANCH], cwd=ROOT, capture_output=True, text=True)
    if run.returncode == 0:
        print(run.stdout.strip(), "" if run.stdout.startswith("Already") else "try: ./scripts/test.sh", sep="\n")
        return 0
    if not git(ROOT, "ls-files", "--unmerged") and "CONFLICT" not in run.stdout:
        if merging.exists():  # a hook has refused it
            git(ROOT, "merge", "--abort")
        raise ValueError(f"git merge {BRANCH}: {' '.join((run.stderr + run.stdout).split())}")
    print(f"{run.stdout}new.py: solve the conflicts (git status lists them), then: git commit; or: git merge --abort")
    return 1


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints. What it commits is of IDENTITY. Raises ValueError if it fails."""
    run = subprocess.run(["git", *arguments], cwd=folder, env=os.environ | IDENTITY, capture_output=True, text=True)
    if run.returncode:
        raise ValueError(f"git {arguments[0]} in {folder}: {' '.join(run.stderr.split())}")
    return run.stdout.strip()
