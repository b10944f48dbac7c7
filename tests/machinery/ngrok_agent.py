"""A fake of ngrok's agent: it has the same local API and log on stdout, and serves the "public" address here.

AGENT is JSON: `notes` is the file for what it receives; `fault` is "refuse" (it ends with an error that contains the
token) or "deaf" (its API refuses all requests).
"""

import base64
import json
import os
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SETTINGS = json.loads(os.environ["AGENT"])
REQUESTS = []


class Public(BaseHTTPRequestHandler):
    """The public side: asks for the password of the policy and forwards requests."""

    def do_GET(self):
        first = REQUESTS[0]["traffic_policy"]["on_http_request"][0]["actions"][0]
        if not self.is_authorized(first):
            return
        try:
            with urllib.request.urlopen(REQUESTS[0]["upstream"]["url"] + self.path, timeout=60) as answer:
                self.reply(200, answer.read())
        except urllib.error.HTTPError as error:
            self.reply(error.code)

    def is_authorized(self, action):
        pairs = [f"Basic {base64.b64encode(pair.encode()).decode()}" for pair in action["config"]["credentials"]]
        if self.headers.get("Authorization") not in pairs:
            self.reply(401, **{"WWW-Authenticate": "Basic"})
            return False
        return True

    def reply(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """stdout is the agent's log."""


class Api(Public):
    """The agent's local API."""

    def do_GET(self):
        self.reply(200, b'{"endpoints": []}')

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if SETTINGS.get("fault") == "deaf":
            self.reply(400, json.dumps({"msg": f"cannot take {request}"}).encode())
            return
        REQUESTS.append(request)
        note(request=request)
        url = serve(Public)
        self.reply(201, json.dumps({"name": request["name"], "url": url, "public_url": url}).encode())


def serve(handler) -> str:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def note(**facts):
    facts = {"argv": sys.argv, "token": os.environ.get("NGROK_AUTHTOKEN"), "pid": os.getpid(), **facts}
    partial = Path(SETTINGS["notes"] + ".partial")
    partial.write_text(json.dumps(facts))
    partial.replace(SETTINGS["notes"])


def say(level, message, **fields):
    more = "".join(f" {name}={value}" for name, value in fields.items())
    print(f't=2026-01-01T00:00:00Z lvl={level} msg="{message}"{more}', flush=True)


def main():
    note()
    if SETTINGS.get("fault") == "refuse":
        token = os.environ.get("NGROK_AUTHTOKEN")
        say("eror", "session closed", err=f'"authentication failed: {token} is no token. ERR_NGROK_105"')
        sys.exit(1)
    say("info", "starting web service", obj="web", addr=serve(Api).removeprefix("http://"))
    say("info", "tunnel session started", obj="tunnels.session")
    say("info", "client session established", obj="csess")
    threading.Event().wait()


if __name__ == "__main__":
    main()
