from hypothesis import settings

settings.register_profile("dstrial", deadline=None)
settings.load_profile("dstrial")
