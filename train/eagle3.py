"""Train an EAGLE-3 head on harvested features.

accelerate launch train/eagle3.py --config configs/smollm2-eagle3.yaml
"""

from headwright.train.run import main

if __name__ == "__main__":
    main(kind="eagle3")
