"""The tunnel of -ngrok, with a stand-in for ngrok's agent: locked or closed, no secret told, gone with the run."""

import argparse
import base64
import json
import os
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from processes import ROOT, until

from lib import config
from lib.utils.errors import UsageError
from lib.utils.monitoring import tensorboard_server, tunnel

TOKEN, PASSWORD = "2secretTokenOfTheUser", "correct-horse-9"


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Sets the stand-in up: agent(fault) gives the file of its notes."""
    program = tmp_path / "agent"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests" / "machinery" / "ngrok_agent.py"} "$@"\n')
    program.chmod(0o700)
    notes = tmp_path / "notes.json"

    def set_up(fault=None):
        monkeypatch.setenv("PYNGROK_NGROK_PATH", str(program))
        monkeypatch.setenv("AGENT", json.dumps({"notes": str(notes), "fault": fault}))
        monkeypatch.setenv("NGROK_AUTHTOKEN", TOKEN)
        monkeypatch.setenv("NGROK_PASSWORD", PASSWORD)
        monkeypatch.setenv("HOME", str(tmp_path))  # where pyngrok keeps a configuration
        return notes

    return set_up


def fetched(address, user=None, password=None):
    request = urllib.request.Request(address)
    if user:
        request.add_header("Authorization", f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def locked(*words, **given):
    """The Lock of these flags."""
    return tunnel.Lock(argparse.Namespace(**vars(config.parse_args(list(words))), **given))


def test_the_tunnel_of_a_run_is_locked_told_and_gone_with_it(agent, start, tmp_path):
    notes = agent()
    run = start("shared", "-ngrok", "-ngrok_auth", "ann", cpu=2, deed={"do": "pause", "step": 25, "rank": 0},
                env=dict(os.environ))  # fmt: skip
    file = run.folder / "tensorboard_address.txt"
    run.says(f"TensorBoard for others: the address is in {file}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    local, address = (line.partition(": ")[2] for line in file.read_text().splitlines())
    word = local.rstrip("/").rpartition("/")[2]
    assert len(word) > 16 and local.startswith("http://127.0.0.1:") and word in address
    file.unlink()  # it alone may hold the word
    with pytest.raises(urllib.error.HTTPError, match="401"):
        fetched(address)
    assert "TensorBoard" in fetched(address, "ann", PASSWORD)

    facts = json.loads(notes.read_text())
    assert facts["token"] == TOKEN, "the agent reads it itself"
    words = Path(f"/proc/{facts['pid']}/cmdline").read_text()
    assert TOKEN not in words and PASSWORD not in words
    assert facts["asked"]["inspect"] is False

    os.kill(run.pid, signal.SIGKILL)
    run.go()
    until(lambda: not Path(f"/proc/{facts['pid']}").exists(), what="the end of the agent")
    with pytest.raises(OSError, match="refused"):
        fetched(address)
    left = [*(tmp_path / "out").rglob("*"), *tmp_path.glob("log_*")]
    texts = [path.read_text(errors="ignore") for path in left if path.is_file()]
    assert len(texts) > 5 and not [text for text in texts if TOKEN in text or PASSWORD in text or word in text]


def test_a_made_up_password_is_shown_on_a_terminal_only(agent, start, tmp_path):
    notes = agent()
    env = {**os.environ, "NGROK_PASSWORD": None}
    run = start("shown", "-ngrok", cpu=1, terminal=("stdout",), env=env, deed={"do": "pause", "step": 25})
    run.says("its password, shown only here and now: ")
    assert "TensorBoard: http://127.0.0.1:" in run.text()
    said = run.text().partition("here and now: ")[2].split()[0]
    run.go()
    assert len(said) >= 12 and run.ends() == 0
    pairs = json.loads(notes.read_text())["asked"]["traffic_policy"]["on_http_request"][0]["actions"][0]["config"]
    assert pairs["credentials"] == [f"baton:{said}"]
    until(lambda: not Path(f"/proc/{json.loads(notes.read_text())['pid']}").exists(), what="the end of the agent")
    assert run.outcome()["state"] == "finished" and not (run.folder / "tensorboard_address.txt").exists()
    out = tmp_path / "out"
    assert not [path for path in out.rglob("*") if path.is_file() and said in path.read_text(errors="ignore")]

    run = start("unseen", "-ngrok", cpu=1, env=env)  # nobody could read it
    assert run.ends() == 0 and run.text().count("set NGROK_PASSWORD; no tunnel") == 1


@pytest.mark.parametrize(("fault", "told"), [
    ("open", "anybody could enter"),
    ("refuse", "ERR_NGROK_105"),
    ("deaf", "HTTPError"),
    ("none", "not installed"),
])  # fmt: skip
def test_a_tunnel_that_fails_is_one_warning_without_secrets(agent, tmp_path, monkeypatch, caplog, fault, told):
    notes = agent(fault)
    if fault == "none":
        monkeypatch.setenv("PYNGROK_NGROK_PATH", str(tmp_path / "nothing"))
    heard = []
    policy = locked("-ngrok").policy
    server = tensorboard_server.serve(tmp_path, lambda *words: heard.append(words), policy=policy)
    until(lambda: caplog.records, what="a warning")
    assert [name for name, _ in heard] == ["address"], "-tb's server is there all the same"
    assert "TensorBoard" in fetched(server.address)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert told in caplog.text and TOKEN not in caplog.text and PASSWORD not in caplog.text
    if fault != "none":
        until(lambda: not Path(f"/proc/{json.loads(notes.read_text())['pid']}").exists(), what="the agent's end")
    server.close()


def test_a_sign_in_lets_in_those_who_were_named(agent):
    agent()
    policy = locked("-ngrok", "-ngrok_oauth", "google", "-ngrok_allow", "Ann@b.c", "-ngrok_allow", "d@e.f").policy
    first, then = policy["on_http_request"]
    assert first == {"actions": [{"type": "oauth", "config": {"provider": "google"}}]}
    assert then["actions"] == [{"type": "deny"}] and "['ann@b.c', 'd@e.f']" in then["expressions"][0]
    code = ("import sys, json; from lib.utils.monitoring import tunnel; "
            "print(tunnel.opened('http://127.0.0.1:9/word/', json.loads(sys.argv[1])))")  # fmt: skip
    told = subprocess.run([sys.executable, "-c", code, json.dumps(policy)], cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.startswith("http://127.0.0.1:") and told.stdout.endswith("/word/\n"), told.stderr


@pytest.mark.parametrize("password", ["short", "with a space in it", "with:a:colon:inside", "with${cel}inside"])
def test_a_weak_password_opens_no_tunnel(agent, monkeypatch, caplog, password):
    agent()
    monkeypatch.setenv("NGROK_PASSWORD", password)
    assert locked("-ngrok").policy is None and "12 to 128" in caplog.text and password not in caplog.text


def test_a_sign_in_needs_both_its_flags_and_no_token_is_one(agent):
    for words in (["-ngrok_oauth", "google"], ["-ngrok_allow", "a@b.c"], ["-ngrok_token", "x"]):
        with pytest.raises(UsageError, match="-ngrok_"):
            config.parse_args(["-ngrok", *words])
    assert locked().policy is None


def test_the_script_that_would_download_an_agent_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "ngrok").write_text("#!/bin/python\nfrom pyngrok.ngrok import main\n")
    (tmp_path / "ngrok").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="not installed"):
        tunnel.agent(str(tmp_path / "nothing"))
    (tmp_path / "ngrok").write_text("#!/bin/sh\n")
    assert tunnel.agent(str(tmp_path / "nothing")) == str(tmp_path / "ngrok")
