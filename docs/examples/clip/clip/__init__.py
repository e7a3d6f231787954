# clip/__init__.py
import titanlite

titanlite.register_model("clip", "clip.model:Clip", "clip.model:Sizes", plan="clip.model:PLAN")
titanlite.register_dataset(
    "digit_halves",
    "clip.data:Halves",
    has_tokens=False,
    fields={"image": None, "text": None, "targets": None},
)
