# dit/fields.py
from .loss import squared_error
from .model import DiT


class FieldDiT(DiT):
    def forward(self, image, noise, time):
        return self.velocity(image, noise, time)


def flow_matching(velocity, batch):
    return squared_error(velocity, batch["noise"], batch)
