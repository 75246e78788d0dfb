"""Addresses of buckets, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`."""

ADDRESS = r"(s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]*(/\.*[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]*)*"


def is_address(text: str) -> bool:
    return text.startswith(("s3://", "gs://"))
