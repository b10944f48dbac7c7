"""A web server of files for tests: web.py FOLDER [MS]. It prints its port, and waits MS before each answer.

By the first part of a path: /good/ as it should be, with parts of files; /busy/ with an error at every eighth
request; /cut/ with half of the body at every eighth; /whole/ with whole files only.
"""

import http.server
import itertools
import sys
import time

requests, latency_ms = itertools.count(), int([*sys.argv, "0"][2])


class Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def translate_path(self, path):
        self.mode = path.split("/")[1]
        return super().translate_path(path.removeprefix(f"/{self.mode}"))

    def do_GET(self):
        time.sleep(latency_ms / 1000)
        part, file = self.headers.get("Range", ""), self.translate_path(self.path)
        bad = next(requests) % 8 == 7
        if self.mode == "busy" and bad:
            self.send_error(503)
        elif not part or self.mode == "whole":
            super().do_GET()
        else:
            begin, end = (int(one) for one in part.removeprefix("bytes=").split("-"))
            with open(file, "rb") as opened:  # noqa: PTH123
                opened.seek(begin)
                body = opened.read(end - begin + 1)
            self.send_response(206)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Range", f"bytes {begin}-{end}/*")
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if self.mode == "cut" and bad else body)
            self.close_connection = self.mode == "cut" and bad


if __name__ == "__main__":
    http.server.ThreadingHTTPServer.request_queue_size = 128  # else connections that come at once wait for seconds
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Handler(*given, directory=sys.argv[1]))
    print(server.server_port, flush=True)
    server.serve_forever()
