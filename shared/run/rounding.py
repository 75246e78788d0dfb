"""Bounds of rounding: by how much log-probabilities of right weights differ between implementations.

Right weights differ from exact arithmetic by the rounding of the dtype, which depends on the model and on the token:
trained models have activations with outliers, and a few tokens move several times as far as the median. The trainer
measures the noise of each token of its probe. A difference counts in units of that noise, and at most `MOST`, so that
no few tokens decide.
"""

LIMIT, MOST = 2.0, 4.0
"""Allowed mean of a probe's differences in units of their noise, each counted as `MOST` at most."""
MEAN_LIMIT, LARGEST_LIMIT = 2.5, 8.0
"""Allowed mean and largest |difference| of sampled tokens, as multiples of the trainer's own on the same tokens."""
FLOOR = 2e-5
"""Least noise assumed, in nats: float32 against float64 shows up to 5e-6."""
UNKNOWN_NOISE = {"float32": 5e-4, "bfloat16": 0.1}
"""Noise assumed of tokens whose own is not known."""
