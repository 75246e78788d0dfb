"""Bounds of rounding: by how much log-probabilities of right weights differ between implementations.

Right weights differ from exact arithmetic by the rounding of the dtype, which depends on the model. The trainer
measures its own noise; engines measured 0.7 to 1.1 times that on average, and 3.7 times at most.
"""

MEAN_LIMIT, LARGEST_LIMIT = 2.5, 8.0
"""Allowed mean and largest |difference|, as multiples of the noise."""
FLOOR = 2e-5
"""Least noise assumed, in nats: float32 against float64 shows up to 5e-6."""
