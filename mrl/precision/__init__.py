"""What fp8 recipes do to a run's own numbers: its samples, a recipe after the other, against float32."""

from mrl.precision.measure import Row, measure
from mrl.precision.samples import NoSamples, Samples, samples_of
from mrl.precision.show import lines, picture

__all__ = ["NoSamples", "Row", "Samples", "lines", "measure", "picture", "samples_of"]
