"""A model to publish, and its training."""

import torch


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 20)).to(torch.bfloat16)


def train(module, share=0.01):
    """Change some elements of each parameter."""
    with torch.no_grad():
        for parameter in module.parameters():
            flat = parameter.view(-1)
            chosen = torch.randperm(len(flat))[: max(1, int(len(flat) * share))]
            flat[chosen] += 1
