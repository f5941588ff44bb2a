"""A bucket over HTTP in this process: as much of S3 as obstore asks for, in front of `MemoryObjects`.

It takes every bucket, and of a signature looks at the digest of the body alone. What S3 itself does, moto and ministack
know better: `make remote` has them judge the same tests.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from torpor.tests.memvid.remote.faulty_objects import MemoryObjects
from torpor.tests.memvid.remote.loopback import Loopback


def _date(ns: int) -> str:
    return datetime.fromtimestamp(ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


_RANGE: Final = re.compile(r"bytes=(\d+)-(\d*)")


class BucketServer(Loopback):
    """Serves until it is closed. bucket: what it holds. is_versioned: it names a version with each object, as a bucket
    does that keeps old ones."""

    def __init__(self, *, is_versioned: bool = False) -> None:
        self.is_versioned = is_versioned
        self.bucket = MemoryObjects()
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        super().__init__(type("Handler", (_Handler,), {"held": self}))


class _Handler(BaseHTTPRequestHandler):
    held: BucketServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a small body waits for the client to have acknowledged the headers

    def log_message(self, *args: Any) -> None:
        pass

    def _begin(self) -> tuple[str, dict[str, str]]:
        """The key, and what the query says."""
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix("/").partition("/")[2]
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        return key, query

    def _body(self) -> bytes | None:
        """None: it did not come whole, as whoever sent it went away."""
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        if len(body) < size:
            self.close_connection = True
            return None
        return body

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if self.held.is_versioned and "ETag" in headers:
            self.send_header("x-amz-version-id", "3sL4kqtJlcpXroDTDmJ")
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

    def do_PUT(self) -> None:
        key, query = self._begin()
        body, held = self._body(), self.held
        if body is None:
            return None
        signed = self.headers.get("x-amz-content-sha256", "")
        if len(signed) == 64 and signed != hashlib.sha256(body).hexdigest():
            return self._refuse(400, "XAmzContentSHA256Mismatch")
        if "uploadId" in query:
            with held.lock:
                held.uploads[query["uploadId"]][int(query["partNumber"])] = body
            return self._answer(200, ETag='"part"')
        if self.headers.get("If-None-Match") == "*":
            tag = held.bucket.create(key, body)
        elif self.headers.get("If-Match"):
            if held.bucket.content(key) is None:
                return self._refuse(404, "NoSuchKey")
            tag = held.bucket.replace(key, body, self.headers["If-Match"])
        else:
            held.bucket.put(key, [body], len(body))
            tag = '"put"'
        return self._refuse(412, "PreconditionFailed") if tag is None else self._answer(200, ETag=tag)

    def do_POST(self) -> None:
        key, query = self._begin()
        if self._body() is None:
            return None
        held = self.held
        if "uploads" in query:
            upload = f"upload-{next(held.numbers)}"
            held.uploads[upload] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            return self._answer(200, text.encode())
        with held.lock:
            parts = held.uploads.pop(query["uploadId"], None)
        if parts is None:
            return self._refuse(404, "NoSuchUpload")
        data = b"".join(parts[number] for number in sorted(parts))
        held.bucket.put(key, [data], len(data))
        text = '<CompleteMultipartUploadResult><ETag>"whole"</ETag></CompleteMultipartUploadResult>'
        return self._answer(200, text.encode())

    def do_DELETE(self) -> None:
        key, query = self._begin()
        if "uploadId" in query:
            self.held.uploads.pop(query["uploadId"], None)
        else:
            self.held.bucket.remove(key)
        self._answer(204)

    def do_GET(self) -> None:
        key, query = self._begin()
        if "list-type" in query:
            return self._list(query.get("prefix", ""))
        found = self.held.bucket.get(key, 1 << 40)
        if found is None:
            return self._refuse(404, "NoSuchKey")
        size = len(found.data)
        headers = {"ETag": found.tag, "Last_Modified": "Mon, 30 Nov 2026 12:00:00 GMT"}
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked is None:
            return self._answer(200, found.data, Content_Length=str(size), **headers)
        first, end = int(asked[1]), min(int(asked[2] or size) + 1, size)
        if first >= size:
            return self._refuse(416, "InvalidRange")
        return self._answer(206, found.data[first:end], Content_Range=f"bytes {first}-{end - 1}/{size}", **headers)

    do_HEAD = do_GET  # noqa: N815

    def _list(self, prefix: str) -> None:
        lines = [
            f"<Contents><Key>{escape(entry.key)}</Key>"
            f"<LastModified>{_date(entry.modified_ns)}</LastModified>"
            f'<ETag>"{entry.size_bytes}"</ETag><Size>{entry.size_bytes}</Size></Contents>'
            for entry in self.held.bucket.entries(prefix)
        ]
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(lines)}</ListBucketResult>"
        self._answer(200, text.encode())
