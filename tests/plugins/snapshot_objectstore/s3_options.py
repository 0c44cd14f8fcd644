"""The options of a server of S3."""


def options(server, **more):
    return {
        "key": server.key,
        "secret": server.secret,
        "endpoint_url": server.url,
        "client_kwargs": {"region_name": server.region},
        **more,
    }
