-- ARGV: nonce, epoch, low, version, issued, void, above. Returns {epoch, fence}. Closes the queue until open_chunk opens it.
-- Entries without a ticket's record would be delivered beside the entries that replace them.
if size('XLEN', Q) ~= size('HLEN', SEEN) then forget() end
local epoch = math.max(num('epoch'), tonumber(ARGV[2]), tonumber(ARGV[7])) + 1
local fence, low = epoch .. '-' .. ARGV[1], tonumber(ARGV[3])
local issued = math.max(tonumber(ARGV[5]), low)
if tonumber(ARGV[2]) == 0 then
  -- No checkpoint exists, so nothing here belongs to this lineage: start from nothing.
  redis.call('UNLINK', Q, LEASE, SEEN, TRIES)
else
  issued = math.max(issued, num('issued'))
end
redis.call('UNLINK', DONE)

-- One consumer group per incarnation. Destroying the others fences their readers; id 0 delivers everything again.
-- `mark` is the last entry delivered to the last incarnation that read, if it made no step: no commit and no checkpoint
-- beyond `base`, the step at which it `began`. An incarnation that did not reach open_chunk has read and counted nothing.
local uncounted = redis.call('HGET', ST, 'phase') == 'queued' and redis.call('HGET', ST, 'cursor') == '0'
local base = uncounted and num('base') or num('began')
local fruitless = redis.call('HGET', ST, 'progressed') ~= '1' and tonumber(ARGV[4]) <= base
local mark = uncounted and redis.call('HGET', ST, 'mark') or '0-0'
redis.call('XGROUP', 'CREATE', Q, 't' .. fence, '0', 'MKSTREAM')
for _, group in ipairs(redis.call('XINFO', 'GROUPS', Q)) do
  local fields = {}
  for i = 1, #group, 2 do fields[group[i]] = group[i + 1] end
  if fields['name'] ~= 't' .. fence then
    if not uncounted then mark = fields['last-delivered-id'] end
    redis.call('XGROUP', 'DESTROY', Q, fields['name'])
  end
end
if not fruitless then mark = '0-0' end
if tonumber(ARGV[4]) > base then redis.call('UNLINK', TRIES) end  -- a step forgets earlier deaths
redis.call('HSET', ST, 'ready', 0, 'epoch', epoch, 'fence', fence, 'low', low, 'version', ARGV[4], 'issued', issued,
  'void', ARGV[6], 'progressed', 0, 'phase', 'queued', 'cursor', 0, 'mark', mark,
  'base', base, 'began', ARGV[4], 'refused', '')
for field, first in pairs({ wake = 0, lineage = '[]', beginning = '' }) do redis.call('HSETNX', ST, field, first) end
now_ms()
return { epoch, fence }
