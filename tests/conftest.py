"""How hard hypothesis tries: ``ci`` by default, ``nightly`` by ``HYPOTHESIS_PROFILE`` or ``--hypothesis-profile``.

No deadlines, and slow generation is no fault of a test: machines also do something else.
"""

import os

from hypothesis import HealthCheck, settings

COMMON = settings(deadline=None, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("ci", COMMON, max_examples=100)
settings.register_profile("nightly", COMMON, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
