-- note_gauges(record, gauges; milliseconds, value) -> {verdict}
--
-- Write the gauges of an engine. Redis removes them if no newer ones replace them in time.
--
-- KEYS  record        hash        the publisher's record
--       gauges        string, PX  the last gauges of its engine
-- ARGV  milliseconds  how long the value is valid
--       value         the gauges, as JSON
--
-- {'applied'}  written
-- {'gone'}     the publisher is not registered any more; nothing written

if redis.call('EXISTS', KEYS[1]) == 0 then return {'gone'} end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[1])
return {'applied'}
