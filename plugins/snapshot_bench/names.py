"""What `snapshot bench` measures, by name: its help lists that, and does not need torch."""

CASES = {
    "large": "4 float32 tensors of 256 MiB",
    "small": "10,000 float32 tensors of 4 KiB",
    "train": "a transformer of 12 layers with AdamW's moments, about 1 GiB",
    "manifest": "opening a manifest of 100,000 entries",
    "keys": "100 keys in the app state, 50 tensors of 64 bytes in each",
}
DEFAULT = ("large", "small", "train")
INCREMENTAL = {
    "lora": "frozen layers of 16 MiB with trained adapters and their AdamW: 99 % of the bytes do not change",
    "half": "frozen layers, and as many bytes of trained ones with AdamW",
    "full": "the state of `train`, where everything changes",
}
"""States with tensors that change between two takes, for takes with a base."""
PEERS = ("torch.save", "safetensors", "dcp", "torchsnapshot")
