"""What an application and a manager note in the metadata of a snapshot, without what each take notes by itself."""


def noted(metadata):
    """Return metadata without the environment."""
    return {key: value for key, value in metadata.items() if key != "snapshot.environment"}
