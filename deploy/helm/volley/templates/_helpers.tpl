{{- /* Start of all names. Names of Services begin with a letter and have no dots; those of releases need not. */ -}}
{{- define "volley.name" -}}
{{- $name := replace "." "-" .Release.Name }}
{{- if regexMatch "^[0-9]" $name }}{{ $name = printf "volley-%s" $name }}{{ end }}
{{- contains "volley" $name | ternary $name (printf "%s-volley" $name) | trunc 26 | regexFind "^.*[^-]" -}}
{{- end }}

{{- define "volley.secret" -}}
{{- .Values.secrets.existingSecret | default (printf "%s-secrets" (include "volley.name" .)) -}}
{{- end }}

{{- define "volley.labels" -}}
{{ include "volley.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end }}

{{- define "volley.selector" -}}
app.kubernetes.io/name: volley
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "volley.match" -}}
{{- dict "matchLabels" (include "volley.selector" . | fromYaml) | toJson -}}
{{- end }}

{{- /* Metadata of an object: `component`, and a `suffix` of its name. */ -}}
{{- define "volley.metadata" -}}
name: {{ include "volley.name" .root }}-{{ .suffix | default .component }}
namespace: {{ .root.Release.Namespace | quote }}
labels: {{- include "volley.labels" . | nindent 2 }}
{{- end }}

{{- define "volley.podMetadata" -}}
labels:
  {{- include "volley.selector" . | nindent 2 }}
  {{- with .values.podLabels }}{{ toYaml . | nindent 2 }}{{ end }}
annotations:
  kubectl.kubernetes.io/default-container: {{ .component }}
  {{- if ne .component "redis" }}
  checksum/config: {{ include "volley.layers" .root | sha256sum | trunc 16 | quote }}  # another configuration restarts the Pod
  {{- end }}
  {{- with .values.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{- /* Fields of a Pod that do not depend on its containers. */ -}}
{{- define "volley.pod" -}}
serviceAccountName: {{ include "volley.name" .root }}{{ has .component (list "trainer" "rollout") | ternary "-bucket" "" }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
{{- with index $.values $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Fields of a container: `image`, `values` of its component, `mounts` as a list. */ -}}
{{- define "volley.container" -}}
image: {{ index .root.Values.images .image | quote }}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
securityContext: {{- include "volley.securityContext" .values | nindent 2 }}
resources: {{- toYaml .values.resources | nindent 2 }}
volumeMounts:
  {{- toYaml (concat .mounts (.values.extraVolumeMounts | default list)) | nindent 2 }}
{{- end }}

{{- /* `merge` would take a given `false` for missing. */ -}}
{{- define "volley.securityContext" -}}
{{- $given := .securityContext | default dict | deepCopy }}
{{- range $key, $value := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" dict }}
{{- if not (hasKey $given $key) }}{{ $given = set $given $key $value }}{{ end }}
{{- end }}
{{- if not (hasKey $given.capabilities "drop") }}{{ $_ := set $given.capabilities "drop" (list "ALL") }}{{ end }}
{{- toYaml $given }}
{{- end }}

{{- /* A service's environment, port and probes. A start-up probe outlasts downloads and compilation. */ -}}
{{- define "volley.service" -}}
env:
  - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
  {{- with .values.extraEnv }}{{ toYaml . | nindent 2 }}{{ end }}
ports: [{name: http, containerPort: {{ .port }}}]
startupProbe: {httpGet: {path: /health, port: http}, periodSeconds: 5, timeoutSeconds: 6, failureThreshold: {{ div (add .values.startSeconds 4) 5 }}}
livenessProbe: {httpGet: {path: /health, port: http}, periodSeconds: 10, timeoutSeconds: 6, failureThreshold: 6}
readinessProbe: {httpGet: {path: /ready, port: http}, periodSeconds: 5, timeoutSeconds: 6}
{{- end }}

{{- /* Options that name the layers of the configuration: the run's, the containers', the cluster's. */ -}}
{{- define "volley.options" -}}
{{- range .Values.configFiles }}--config {{ . }} {{ end -}}
--config /etc/volley/run.yaml --config docker/stack.yaml --config /etc/volley/cluster.yaml
{{- end }}

{{- define "volley.command" -}}
{{- toJson (concat .start (splitList " " (include "volley.options" .root)) (.overrides | default list)) -}}
{{- end }}

{{- define "volley.commonVolumes" -}}
- {name: config, configMap: {name: {{ include "volley.name" .root }}-config}}
- name: secrets
  secret:
    secretName: {{ include "volley.secret" .root | quote }}
    defaultMode: 0440
    {{- with .secrets }}
    items: [{{ range $i, $key := . }}{{ if $i }}, {{ end }}{key: {{ $key }}, path: {{ $key }}}{{ end }}]
    {{- end }}
- {name: tmp, emptyDir: {sizeLimit: 4Gi}}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "volley.commonMounts" -}}
- {name: config, mountPath: /etc/volley, readOnly: true}
- {name: secrets, mountPath: /run/secrets, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- /* A claim of one component: `storage`. */ -}}
{{- define "volley.claimSpec" -}}
accessModes: [ReadWriteOnce]
{{- with .class }}
storageClassName: {{ toJson . }}
{{- end }}
resources: {requests: {storage: {{ .size | quote }}}}
{{- end }}

{{- define "volley.processes" -}}
{{- mul .Values.trainer.hosts .Values.trainer.slices -}}
{{- end }}

{{- define "volley.grace" -}}
{{- $limits := dig "services" "limits" dict .Values.config -}}
{{- add (ceil ($limits.grace_s | default 10)) 15 -}}
{{- end }}

{{- /* Seconds until a Deployment without a new ready Pod counts as failed: ten minutes to find a node, and the start. */ -}}
{{- define "volley.progress" -}}
{{- add .startSeconds 600 -}}
{{- end }}

{{- /* Numbers get a point before their exponent: without one, YAML 1.1 reads text. A line of JSON that ends in digits is one. */ -}}
{{- define "volley.layers" -}}
run.yaml: |
  {{- regexReplaceAll "(?m)( -?[0-9]+)(e[-+][0-9]+,?)$" (toPrettyJson .Values.config) "${1}.0${2}" | nindent 2 }}
cluster.yaml: |
  services:
    redis_url: {{ .Values.redis.enabled | ternary (printf "redis://%s-redis:6379/0" (include "volley.name" .)) .Values.redis.url | toJson }}
    env: {url: "http://{{ include "volley.name" . }}-env:8101"}
    orchestrator: {url: "http://{{ include "volley.name" . }}-orchestrator:8103"}
    trainer:
      url: http://{{ include "volley.name" . }}-trainer:8104
      num_processes: {{ include "volley.processes" . }}
      {{- if gt (include "volley.processes" . | int) 1 }}
      coordinator_address: {{ include "volley.name" . }}-trainer:8105
      {{- end }}
{{- end }}
