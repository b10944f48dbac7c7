"""A fake of ngrok's agent, with its local API and log, and no tunnel; AGENT_NOTES is the file for what it gets."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NOTES = Path(os.environ["AGENT_NOTES"])
PUBLIC = "https://a-public-address.example"


class Api(BaseHTTPRequestHandler):
    """The agent's local API, which opens tunnels."""

    def do_GET(self):
        self.reply(200, {"endpoints": []})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note(request=request)
        self.reply(201, {"name": request["name"], "url": PUBLIC, "public_url": PUBLIC})

    def reply(self, code, answer):
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """stdout is the agent's log."""


def note(**facts):
    facts = {"token": os.environ.get("NGROK_AUTHTOKEN"), "pid": os.getpid(), **facts}
    partial = NOTES.with_suffix(".partial")
    partial.write_text(json.dumps(facts))
    partial.replace(NOTES)


if __name__ == "__main__":
    note()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    begin = "t=2026-01-01T00:00:00Z lvl=info msg="
    print(f'{begin}"starting web service" obj=web addr=127.0.0.1:{server.server_port}')
    print(f'{begin}"tunnel session started" obj=tunnels.session')
    print(f'{begin}"client session established" obj=csess', flush=True)
    threading.Event().wait()
