"""``glm5next bringup``: GRPO steps on a small task that show whether trainer, rollout engine and weight sync agree.

* :mod:`.task`: a task with checkable answers that a random model learns in minutes;
* :mod:`.grpo`: advantages and loss;
* :mod:`.engine`: the rollout engine, transformers in a process of its own;
* :mod:`.trainer`: what a trainer must offer, and its processes;
* :mod:`.loop`: the steps;
* :mod:`.probe`, :mod:`.diagnosis`: where two sides part that should agree.
"""
