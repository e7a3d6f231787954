# clip/data.py
import torch
from sklearn.datasets import load_digits


class Halves:
    def __init__(self, *, split, **_):
        pixels = torch.tensor(load_digits().data, dtype=torch.int64)
        self.pixels = pixels[:1500] if split == "train" else pixels[1500:]
        self.num_samples = len(self.pixels)

    def sample(self, index):
        upper, lower = self.pixels[index % self.num_samples].chunk(2)
        return {"image": upper.float() / 16, "text": lower, "targets": torch.tensor(0)}
