"""Parts of the script that trains the small model shipped with Torpor (see ``bench/train_demo_model.py``)."""
