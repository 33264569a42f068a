"""Estimate the cost of a training run before it starts: parameters, tokens, FLOPs, memory and hours (`m3diff plan`).

The samples of an epoch are counted in the run's mixture. If there is no mixture, the published counts of the datasets
are used, and datasets without published counts are counted in their annotation files.
"""

from m3diff.commands.plan.figures import BasicPlan, Plan, Run, make_plan, plan_alignment
from m3diff.commands.plan.fit import check_fits, check_memory
from m3diff.commands.plan.text import print_plan
from m3diff.commands.plan.warnings import warnings_before_training
from m3diff.commands.plan.without_flops import plan_run

__all__ = [
    "BasicPlan",
    "Plan",
    "Run",
    "check_fits",
    "check_memory",
    "make_plan",
    "plan_alignment",
    "plan_run",
    "print_plan",
    "warnings_before_training",
]
