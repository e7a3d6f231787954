# dit/__init__.py
import titanlite

for name, model, loss, data, fields in (
    ("dit", "dit.model:DiT", "dit.loss", "dit.data:Digits", ("image", "targets")),
    (
        "dit_fields",
        "dit.fields:FieldDiT",
        "dit.fields",
        "dit.noisy:NoisyDigits",
        ("image", "targets", "noise", "time"),
    ),
):
    titanlite.register_model(name, model, "dit.sizes:Sizes", plan="dit.plan:PLAN")
    titanlite.register_loss(name, f"{loss}:flow_matching")
    titanlite.register_dataset(name, data, has_tokens=False, fields=dict.fromkeys(fields))
