"""The tunnel of -ngrok, with a fake of ngrok's agent: it needs a password, and ends with the run."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from processes import fake_program, until

import train
from scripts import tensorboard_server

TOKEN, PASSWORD = "2secretTokenOfTheUser", "correct-horse-9"


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """The file of the notes of a fake agent, which the next runs start."""
    code = Path(__file__).with_name("ngrok_agent.py")
    program, notes = fake_program(tmp_path, "agent", f'exec {sys.executable} {code} "$@"'), tmp_path / "notes.json"
    values = {"AGENT_NOTES": notes, "NGROK_AUTHTOKEN": TOKEN, "NGROK_PASSWORD": PASSWORD}
    values |= {"PYNGROK_NGROK_PATH": program, "HOME": tmp_path}  # pyngrok keeps a configuration at home
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    return notes


def test_a_tunnel_asks_for_the_password_and_ends_with_the_run(agent, start, tmp_path):
    fault = {"do": "pause", "step": 25, "rank": 0}
    run = start("shared", "-ngrok", "-ngrok_auth", "ann", fault=fault, env=dict(os.environ))
    run.wait_for_output("TensorBoard for others: https://a-public-address.example\n")
    [local] = re.findall(r"^TensorBoard: (.*)$", run.text(), re.M)
    assert local.startswith("http://127.0.0.1:6")

    facts = json.loads(agent.read_text())
    assert facts["token"] == TOKEN, "the agent reads the token from the environment"
    command = Path(f"/proc/{facts['pid']}/cmdline").read_text()
    assert TOKEN not in command and PASSWORD not in command
    assert facts["request"]["inspect"] is False and facts["request"]["upstream"]["url"] == local.rstrip("/")
    [[first]] = [rule["actions"] for rule in facts["request"]["traffic_policy"]["on_http_request"]]
    assert first == {"type": "basic-auth", "config": {"credentials": [f"ann:{PASSWORD}"]}}

    os.kill(run.pid, signal.SIGKILL)
    run.release()
    until(lambda: not Path(f"/proc/{facts['pid']}").exists(), what="the end of the agent")
    left = [*(tmp_path / "out").rglob("*"), *tmp_path.glob("log_*")]
    texts = [path.read_text(errors="ignore") for path in left if path.is_file()]
    assert len(texts) > 5 and not [text for text in texts if TOKEN in text or PASSWORD in text]


@pytest.mark.parametrize("password", [None, "short", "with${cel}inside"])
def test_a_tunnel_without_a_good_password_is_refused(password, tmp_path, monkeypatch, capsys, script_error):
    monkeypatch.delenv("NGROK_PASSWORD", raising=False)
    if password:
        monkeypatch.setenv("NGROK_PASSWORD", password)
    assert train.main(["-ngrok", "-out", str(tmp_path / "out")]) == 2
    for message in (capsys.readouterr().err, script_error(tensorboard_server, tmp_path, "--ngrok")):
        assert "set NGROK_PASSWORD to 12 to 128 characters" in message and (not password or password not in message)
    assert "nowhere is no folder: give the one that -out" in script_error(tensorboard_server, tmp_path / "nowhere")
