"""The frugal classifiers: Astec, DECAF, ECLARE, InceptionXML, InceptionXML-LF."""
