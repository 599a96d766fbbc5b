"""Distil a small draft model from the target, on the text of harvested features.

accelerate launch train/draft_model.py --config configs/smollm2-draft-model.yaml
"""

from headwright.train.run import main

if __name__ == "__main__":
    main(kind="draft_model")
