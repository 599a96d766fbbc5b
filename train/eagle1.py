"""Train an EAGLE-1 head on harvested features.

accelerate launch train/eagle1.py --config configs/smollm2-eagle1.yaml
"""

from headwright.train.run import main

if __name__ == "__main__":
    main(kind="eagle1")
