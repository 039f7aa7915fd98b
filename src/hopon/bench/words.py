"""Common English words, of which prompts are made; most tokenizers have one token for each."""

from __future__ import annotations

WORDS = tuple(
    (
        "time year people way day man thing woman life child world school state family student group country problem "
        "hand part place case week company system program question work government number night point home water room "
        "mother area money story fact month lot right study book eye job word business issue side kind head house "
        "service friend father power hour game line end member law car city community name president team minute idea "
        "kid body information back parent face others level office door health person art war history party result "
        "change morning reason research girl guy moment air teacher force education the of and to in is that it was "
        "for on are as with his they at be this from have or by one had not but what all were when we there can an "
        "your which their said if do will each about how up out them then she many some so these would other into has "
        "more her two like him see could no make than first been its who now my made over did down only find use may "
        "long little very after called just where most know"
    ).split()
)
