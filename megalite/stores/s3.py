"""S3's protocol, through the client that s3fs sets up (credentials, region and endpoint as users configure them)."""

import asyncio
import base64
import logging
import os
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.extras import optional_package
from megalite.stores.store import NO_OBJECT, PART_BYTES, Again, Missing, Refused, Store, StoreError, Tagged

AT_ONCE, MOST_PARTS = 8, 10_000
CONNECTIONS = 64
_PASSES = (408, 409, 429)  # 409: another conditional write was under way
_ON_THE_WAY = ("BadDigest", "InvalidDigest", "RequestTimeout", "XAmzContentChecksumMismatch")


class S3Store(Store):
    """A bucket of S3. Uploads carry CRC-32, which the server checks; downloads are checked by their readers."""

    def __init__(self, bucket: str) -> None:
        settings = {
            "retries": {"total_max_attempts": 1},
            "connect_timeout": 10,
            "read_timeout": 60,
            "max_pool_connections": CONNECTIONS,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
        super().__init__("s3", bucket, config_kwargs=settings, skip_instance_cache=True)
        self._sync = optional_package(self.root, "fsspec.asyn", "s3fs").sync
        for noisy in ("botocore", "aiobotocore", "aiobotocore.credentials"):  # they report where keys were found
            logging.getLogger(noisy).setLevel(logging.WARNING)

    def _call(self, method: str, **arguments: Any) -> Any:
        """One request, one attempt. The errors of all layers below become ours."""

        async def ask() -> Any:
            await self._fs.set_session()
            client = await self._fs.get_s3(self._bucket)
            answer = await getattr(client, method)(Bucket=self._bucket, **arguments)
            if method == "get_object":
                async with answer["Body"] as stream:
                    answer["Body"] = await stream.read()
            return answer

        async def bounded() -> Any:
            asked, began = asyncio.ensure_future(ask()), time.monotonic()
            while not (await asyncio.wait({asked}, timeout=1.0))[0]:
                if time.monotonic() - began > self.attempt:  # which may become less while we wait
                    asked.cancel()
                    raise TimeoutError(f"no answer for {self.attempt:.0f} s")
            return asked.result()

        try:
            return self._sync(self._fs.loop, bounded)
        except Exception as error:
            raise self._judged(error, str(arguments.get("Key", ""))) from None

    def _judged(self, error: Exception, name: str) -> Exception:
        answer = getattr(error, "response", None)
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        if not isinstance(answer, dict):
            kind = type(error).__name__
            if kind in ("NoCredentialsError", "PartialCredentialsError", "NoRegionError", "InvalidRegionError"):
                return StoreError(f"{self.root}: {text}; see the documentation of AWS on credentials and regions")
            if kind in ("ParamValidationError", "InvalidBucketNameError"):
                return StoreError(f"{self.root}: {text}")
            return Again(f"{kind}: {text}")
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(answer.get("Error", {}).get("Code", ""))
        if code == "NoSuchBucket":
            return StoreError(f"{self.root}: no such bucket; make it first")
        if status == 404:
            return Missing(f"{self.root}/{name}: no such object")
        if status == 412 or code == "PreconditionFailed":
            return Refused(text)
        if status in _PASSES or status >= 500 or not status or code in _ON_THE_WAY:
            return Again(f"{status} {code}")
        if status in (401, 403):
            return StoreError(f"{self.root}/{name}: refused ({status} {code}); check the credentials and their rights")
        return StoreError(f"{self.root}/{name}: {text}")

    def _names(self, prefix: str) -> list[str]:
        names: list[str] = []
        more: dict[str, str] = {}
        while True:
            answer = self._call("list_objects_v2", Prefix=prefix, Delimiter="/", **more)
            names += [entry["Key"] for entry in answer.get("Contents", ())]
            names += [entry["Prefix"] for entry in answer.get("CommonPrefixes", ())]
            if not answer.get("IsTruncated"):
                return [name.removeprefix(prefix) for name in names if name != prefix]
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def _read(self, name: str, start: int, stop: int | None) -> Tagged:
        span = {} if not start and stop is None else {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        answer = self._call("get_object", Key=name, **span)
        if len(answer["Body"]) != answer["ContentLength"]:
            raise Again("the answer was cut off")
        return Tagged(answer["Body"], answer["ETag"])

    def _head(self, name: str) -> tuple[int, str]:
        answer = self._call("head_object", Key=name)
        return answer["ContentLength"], answer["ETag"]

    def _write(self, name: str, data: bytes, etag: str | None) -> str:
        condition = {} if etag is None else {"IfMatch": etag} if etag != NO_OBJECT else {"IfNoneMatch": "*"}
        return str(self._call("put_object", Key=name, Body=data, ChecksumCRC32=_crc(data), **condition)["ETag"])

    def _delete(self, name: str) -> None:
        self._call("delete_object", Key=name)

    def _put_file(self, name: str, file: Path) -> None:
        """In parts of whole blocks, several at once; a small file in one request. What fails is taken back."""
        size = os.path.getsize(file)
        if size <= PART_BYTES:
            self.put(name, file.read_bytes())
            return
        step = PART_BYTES * -(-size // (PART_BYTES * MOST_PARTS))

        def ask(method: str, **arguments: Any) -> Any:
            return self._retrying(lambda: self._call(method, Key=name, **arguments), f"write {name}")

        upload = ask("create_multipart_upload", ChecksumAlgorithm="CRC32")["UploadId"]

        def send(number: int) -> dict[str, Any]:
            with open(file, "rb") as source:
                source.seek(number * step)
                body = source.read(step)
            part = {"PartNumber": number + 1, "ChecksumCRC32": _crc(body)}
            return {**part, "ETag": ask("upload_part", UploadId=upload, Body=body, **part)["ETag"]}

        try:
            with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="upload") as pool:
                parts = list(pool.map(send, range(-(-size // step))))
            try:
                ask("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": parts})
            except Missing:  # no such upload: an answer was lost, and this was its repetition
                if self.size(name) != size:
                    raise
        except BaseException:
            self._drop(name, upload)
            raise

    def _drop(self, name: str, upload: str) -> None:
        """Removes the parts of an upload, if the store answers; else `drop_uploads` will."""
        with suppress(Again, StoreError, Refused):
            self._call("abort_multipart_upload", Key=name, UploadId=upload)

    def drop_uploads(self, prefix: str) -> int:
        found = self._retrying(lambda: self._call("list_multipart_uploads", Prefix=f"{prefix}/"), f"list {prefix}")
        uploads = found.get("Uploads", ())
        for upload in uploads:
            self._drop(upload["Key"], upload["UploadId"])
        return len(uploads)


def _crc(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
