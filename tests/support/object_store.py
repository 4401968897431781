"""An S3 server in this process: moto's, over HTTP, in a folder of packages that only tests of it see."""

import contextlib
import sys
import urllib.request
from pathlib import Path

import pytest


class ObjectStore:
    """`put` and `files` go past what is tested: by boto3."""

    def __init__(self, bucket: str = "bucket"):
        packages = Path(sys.prefix) / "s3"
        if packages.exists() and str(packages) not in sys.path:
            sys.path.append(str(packages))
        server, boto3 = (pytest.importorskip(name) for name in ("moto.server", "boto3"))
        import logging

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        self.endpoint = f"http://127.0.0.1:{self._server.get_host_and_port()[1]}"
        self.env = {
            "AWS_ACCESS_KEY_ID": "who",
            "AWS_SECRET_ACCESS_KEY": "knows",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }
        keys = {"aws_access_key_id": "who", "aws_secret_access_key": "knows", "region_name": "us-east-1"}
        self._client, self._bucket = boto3.client("s3", endpoint_url=self.endpoint, **keys), bucket
        self._client.create_bucket(Bucket=bucket)

    def put(self, folder: Path, prefix: str) -> str:
        """Put a folder there; return its address."""
        for path in (path for path in folder.rglob("*") if path.is_file()):
            name = f"{prefix}/{path.relative_to(folder)}"
            self._client.put_object(Bucket=self._bucket, Key=name, Body=path.read_bytes())
        return f"s3://{self._bucket}/{prefix}"

    def files(self, prefix: str) -> dict[str, bytes]:
        listed = self._client.list_objects_v2(Bucket=self._bucket, Prefix=f"{prefix}/").get("Contents", [])
        names = [item["Key"] for item in listed]
        read = {name: self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read() for name in names}
        return {name.removeprefix(f"{prefix}/"): data for name, data in read.items()}

    def write(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=name, Body=data)

    @contextlib.contextmanager
    def locked(self):
        """The server knows nobody during the body: every request is refused."""
        try:
            self._count_free_requests("0")
            yield
        finally:
            self._count_free_requests("inf")

    def _count_free_requests(self, count: str) -> None:
        request = urllib.request.Request(
            f"{self.endpoint}/moto-api/reset-auth", count.encode(), {"Content-Type": "text/plain"}
        )
        urllib.request.urlopen(request).close()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._server.stop()
