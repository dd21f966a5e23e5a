"""Right loss, wrong gradient: is a training run computing what it should?"""
