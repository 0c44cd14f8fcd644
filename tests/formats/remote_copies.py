"""Copies of checkpoints on a server."""

import contextlib

from tests.helpers.fault_proxy import FaultProxy


@contextlib.contextmanager
def on_s3(folder, moto):
    import boto3

    client = boto3.client(
        "s3", endpoint_url=moto.url, aws_access_key_id=moto.key, aws_secret_access_key=moto.secret,
        region_name=moto.region,
    )  # fmt: skip
    bucket = moto.bucket()
    for file in (each for each in folder.rglob("*") if each.is_file()):
        client.put_object(Bucket=bucket, Key=f"a/{file.relative_to(folder)}", Body=file.read_bytes())
    client.close()
    with FaultProxy(moto.url) as proxy:
        yield proxy, f"s3://{bucket}/a", {
            "key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url,
            "client_kwargs": {"region_name": moto.region},
        }  # fmt: skip
