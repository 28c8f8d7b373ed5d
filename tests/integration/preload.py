"""Imported once by the fork server; see jobs.py."""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import lightning
import torch

import lightning_parcae.strategy
import tests.integration.feature_scripts
import tests.integration.scripts

torch.set_num_threads(1)
__all__ = ["lightning", "lightning_parcae", "tests", "torch"]
