"""A tunnel from the internet to -tb's server, through ngrok's agent: never without a lock that was tried.

The token is ngrok's own matter: its agent takes it from NGROK_AUTHTOKEN or from its own configuration file. Here it
is read only to leave it out of messages.
"""

import logging
import os
import re
import secrets
import shutil
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from lib.utils import distributed
from lib.utils.monitoring import console

log = logging.getLogger(__name__)
PASSWORD = re.compile(r"[!-#%-9;-~]{12,128}")  # no $ and no colon, which mean something to ngrok
TRY_S = 15.0  # until a new address answers


class Lock:
    """What keeps others out: a password, or the sign-in of a provider for some addresses. `policy` is None, with one
    warning, where there is none."""

    def __init__(self, args):
        self.policy, self.secret = None, ""
        if not args.ngrok:
            return
        if args.ngrok_oauth:
            self.policy = sign_in(args.ngrok_oauth, args.ngrok_allow)
            return
        given = distributed.ngrok_password()
        if given is not None and not PASSWORD.fullmatch(given):
            log.warning("-ngrok: NGROK_PASSWORD needs 12 to 128 characters, with no $, colon or space: no tunnel")
        elif given is None and console.terminal() is None:
            log.warning("-ngrok: no terminal is here to show a made-up password on: set NGROK_PASSWORD; no tunnel")
        else:
            self.secret = "" if given else secrets.token_urlsafe(12)
            self.policy = ask_for(args.ngrok_auth, given or self.secret)

    def tell(self):
        """Shows a password that was made up, on the terminal only."""
        if self.secret:
            console.whisper(f"its password, shown only here and now: {self.secret}")


def ask_for(user: str, password: str) -> dict:
    """ngrok's traffic policy for a user and a password (ngrok.com/docs/traffic-policy/actions/basic-auth)."""
    return {"on_http_request": [{"actions": [_action("basic-auth", credentials=[f"{user}:{password}"])]}]}


def sign_in(provider: str, allowed: list[str]) -> dict:
    """ngrok's traffic policy that lets in these e-mail addresses (ngrok.com/docs/traffic-policy/actions/oauth)."""
    others = f"!(actions.ngrok.oauth.identity.email in {[address.lower() for address in allowed]})"
    steps = [
        {"actions": [_action("oauth", provider=provider)]},
        {"expressions": [others], "actions": [_action("deny")]},
    ]
    return {"on_http_request": steps}


def _action(kind, **config):
    return {"type": kind, **({"config": config} if config else {})}


def opened(address: str, policy: dict) -> str:
    """The public address of a tunnel to a local one. Raises RuntimeError, without secrets, if there is none."""
    from pyngrok import conf, ngrok

    config = conf.PyngrokConfig()
    config.auth_token = None  # or it would stand on the agent's command line, for all users of the machine to see
    config.ngrok_path = agent(config.ngrok_path)
    place = urllib.parse.urlsplit(address)
    try:
        tunnel = ngrok.connect(
            f"http://{place.netloc}", pyngrok_config=config, name="baton", inspect=False, traffic_policy=policy
        )
        if not is_locked(tunnel.public_url):
            raise RuntimeError("anybody could enter: ngrok did not lock the tunnel, so it is closed")
    except Exception as error:  # pyngrok's, urllib's, and whatever an agent makes of it
        ngrok.kill(config)
        raise RuntimeError(_harmless(error, policy)) from None
    return tunnel.public_url.rstrip("/") + place.path


def agent(default: str) -> str:
    """The path of ngrok's agent: PYNGROK_NGROK_PATH's, where pyngrok keeps it, or one on PATH. Raises RuntimeError.

    pyngrok would download one without looking at a checksum; so would the script `ngrok` that it installs.
    """
    for path in [default, *(shutil.which("ngrok", path=folder) for folder in os.get_exec_path())]:
        if path and Path(path).is_file():
            with Path(path).open("rb") as file:
                if b"pyngrok" not in file.read(300):
                    return path
    raise RuntimeError("ngrok's agent is not installed: see ngrok.com/download")


class _Stay(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


def is_locked(address: str):
    """True if a stranger is asked for a password, or sent elsewhere to sign in. Raises OSError if nobody answers."""
    opener = urllib.request.build_opener(_Stay, urllib.request.ProxyHandler({}))
    until = time.monotonic() + TRY_S
    while True:
        try:
            with opener.open(address, timeout=TRY_S):
                return False
        except urllib.error.HTTPError as error:
            elsewhere = urllib.parse.urlsplit(error.headers.get("Location", "")).netloc
            return error.code == 401 or (elsewhere and elsewhere != urllib.parse.urlsplit(address).netloc)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _harmless(error, policy):
    text = str(error)
    code = re.search(r"ERR_NGROK_\d+", text)
    if code:  # what stands beside it may hold the token
        return f"{code[0]}: see https://ngrok.com/docs/errors/{code[0].lower()}"
    first = policy["on_http_request"][0]["actions"][0]["config"]
    passwords = [pair.partition(":")[2] for pair in first.get("credentials", [])]
    for secret in filter(None, [*passwords, distributed.ngrok_token()]):
        text = text.replace(secret, "***")
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


def answer(tell, address: str, policy: dict | None):
    """Opens a tunnel and tells its address, or what went wrong."""
    if policy is None:
        return
    try:
        tell(tunnel=opened(address, policy))
    except (RuntimeError, ImportError) as error:
        tell(tunnel_error=str(error))
