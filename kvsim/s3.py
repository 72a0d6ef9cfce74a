"""A place on object storage: the verbs of a path that traces and runs need, by ranged reads and create-only puts.

Credentials come from the environment (AWS_ACCESS_KEY_ID ...), a profile of ~/.aws (AWS_PROFILE), or the machine's role; the endpoint of
another service than Amazon's from the place itself ("s3://bucket/prefix?endpoint=http://host:9000"), AWS_ENDPOINT_URL, or the profile."""

from __future__ import annotations

import configparser
import hashlib
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from kvsim.errors import KvsimError, WrongUse, in_a_line

try:
    import obstore
    from obstore import exceptions as failures
    from obstore.store import S3Store
except ModuleNotFoundError:
    raise WrongUse("places on s3:// need obstore: pip install 'kvsim[s3]'") from None

OPTIONS = ("endpoint", "region", "anonymous")  # what a place may say after a question mark
PATIENCE = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
REFUSED = re.compile(r"\b40[13] (Forbidden|Unauthorized)")  # a listing says no more than that
CHUNK = 8 << 20  # bytes in memory at a time where a whole object is hashed


@dataclass(frozen=True)
class S3Path:
    """An object or a prefix. options: those of the place, sorted."""

    bucket: str
    key: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}" + (f"?{urlencode(self.options)}" if self.options else "")

    def __truediv__(self, name: str) -> S3Path:
        return S3Path(self.bucket, f"{self.key}/{name}".strip("/"), self.options)

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2] or self.bucket

    @property
    def parent(self) -> S3Path:
        return S3Path(self.bucket, self.key.rpartition("/")[0], self.options)

    def with_name(self, name: str) -> S3Path:
        return self.parent / name

    def sizes(self) -> dict[str, int]:
        """The objects below this prefix, by their paths below it, in bytes."""
        start = f"{self.key}/" if self.key else ""
        with _failing(self):
            pages = list(obstore.list(_store(self.bucket, self.options), start))
        return {o["path"].removeprefix(start): o["size"] for page in pages for o in page}

    def names(self) -> set[str]:
        return set(self.sizes())

    def is_file(self) -> bool:
        try:
            with _failing(self):
                obstore.head(_store(self.bucket, self.options), self.key)
        except FileNotFoundError:
            return False
        return True

    def read_bytes(self) -> bytes:
        with _failing(self):
            return bytes(obstore.get(_store(self.bucket, self.options), self.key).bytes())

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, length: int) -> bytes:
        with _failing(self):
            return bytes(obstore.get_range(_store(self.bucket, self.options), self.key, start=start, length=length))

    def sha256(self) -> str:
        found = hashlib.sha256()
        with _failing(self):
            for piece in obstore.get(_store(self.bucket, self.options), self.key).stream(min_chunk_size=CHUNK):
                found.update(bytes(piece))
        return found.hexdigest()

    def reader(self, size: int) -> io.RawIOBase:
        """A file whose every read is one ranged read."""
        return _Ranges(self, size)

    def create(self, content: bytes) -> bool:
        """One put of the whole object, refused where there is one: False then. A put that fails leaves nothing."""
        try:
            with _failing(self):
                obstore.put(_store(self.bucket, self.options), self.key, content, mode="create", use_multipart=False)
        except FileExistsError:
            return False
        return True

    def remove(self) -> None:
        """All objects below this prefix, or this object."""
        names = [f"{self.key}/{name}" for name in self.sizes()] or [self.key]
        with _failing(self):
            obstore.delete(_store(self.bucket, self.options), names)


def s3_path(text: str) -> S3Path:
    """ "s3://bucket/prefix?endpoint=URL&region=NAME&anonymous=true" -> its place. Raises WrongUse."""
    parts = urlsplit(text)
    options = tuple(sorted(parse_qsl(parts.query)))
    if not parts.netloc or not parts.path.strip("/"):
        raise WrongUse(f"{text}: expected s3://BUCKET/PREFIX")
    if unknown := sorted({name for name, _ in options} - set(OPTIONS)):
        raise WrongUse(f"{text}: unknown option {unknown[0]!r}; expected some of {', '.join(OPTIONS)}")
    return S3Path(parts.netloc, parts.path.strip("/"), options)


class _Ranges(io.RawIOBase):
    def __init__(self, path: S3Path, size: int) -> None:
        self.path, self.size, self.at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        many = self.size - self.at if size < 0 else min(size, self.size - self.at)
        found = self.path.read_range(self.at, many) if many > 0 else b""
        self.at += len(found)
        return found


# ------------------------------------------------------------------------------------------------ the service
@cache
def _store(bucket: str, options: tuple[tuple[str, str], ...]) -> Any:
    given = _profile() | {name: value for name, value in dict(options).items() if name != "anonymous"}
    endpoint = given.pop("endpoint", None) or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        given |= {"endpoint": endpoint}
    if dict(options).get("anonymous") == "true":
        given |= {"skip_signature": "true"}
    plain = {"allow_http": True} if (endpoint or "").startswith("http://") else {}
    region = given.pop("region", None) or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return S3Store(bucket, config=given | {"region": region}, client_options=plain, retry_config=PATIENCE)


def _profile() -> dict[str, str]:
    """What ~/.aws says of the profile asked for, or of the default one where the environment has no key."""
    name = os.environ.get("AWS_PROFILE")
    if not name and "AWS_ACCESS_KEY_ID" in os.environ:
        return {}
    home = Path.home() / ".aws"
    said: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", home / "config", f"profile {name}" if name else "default"),
        ("AWS_SHARED_CREDENTIALS_FILE", home / "credentials", name or "default"),
    ):
        found = configparser.RawConfigParser()
        found.read(os.environ.get(variable, file), encoding="utf-8")
        said |= dict(found[section]) if found.has_section(section) else {}
    if name and not said:
        raise WrongUse(f"AWS_PROFILE is {name!r}, which neither {home / 'config'} nor {home / 'credentials'} has")
    words = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
    }
    words |= {"region": "region", "endpoint_url": "endpoint"}
    return {words[key]: value for key, value in said.items() if key in words}


@contextmanager
def _failing(path: S3Path) -> Iterator[None]:
    """The service's complaints as one line. Raises FileNotFoundError, FileExistsError, WrongUse for access, KvsimError for the rest."""
    try:
        yield
    except (FileNotFoundError, failures.NotFoundError) as e:
        raise FileNotFoundError(2, "no such object", str(path)) from e
    except (FileExistsError, failures.AlreadyExistsError, failures.PreconditionError) as e:
        raise FileExistsError(17, "exists already", str(path)) from e
    except (failures.BaseError, OSError) as e:
        text = in_a_line(e).partition(" Debug source")[0]
        if isinstance(e, failures.PermissionDeniedError | failures.UnauthenticatedError) or REFUSED.search(text):
            told = "access refused: check AWS_ACCESS_KEY_ID or AWS_PROFILE, and what they may do in this bucket"
        elif "NoSuchBucket" in text:
            told = f"there is no bucket {path.bucket!r}"
        elif "credential" in text.lower() or "169.254." in text:  # the address that gives a machine's role
            told = "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        else:
            raise KvsimError(f"{path}: {text[:300]}") from e
        raise WrongUse(f"{path}: {told}") from e
