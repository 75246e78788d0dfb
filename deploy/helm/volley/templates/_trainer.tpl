{{- /* Spec of the trainer's Job. `volley follow` is its main container, so that the Job ends with the run; the trainer and
the dashboard run beside it and are restarted in place. */ -}}
{{- define "volley.trainerJob" -}}
{{- $root := .root }}
{{- $storage := .values.storage }}
{{- $disk := list (dict "name" "runs" "mountPath" "/runs" "subPath" "runs") (dict "name" "runs" "mountPath" "/cache" "subPath" "cache") }}
{{- $mounts := concat (include "volley.commonMounts" $root | fromYamlArray) $disk (.values.extraVolumeMounts | default list) }}
{{- $env := .values.extraEnv | default list }}
{{- if .many }}
{{- $index := dict "fieldPath" "metadata.labels['jobset.sigs.k8s.io/job-index']" }}
{{- $env = prepend $env (dict "name" "JOB_INDEX" "valueFrom" (dict "fieldRef" $index)) }}
{{- end }}
{{- $trainer := merge (dict "extraEnv" $env) (omit .values "extraEnv" "extraVolumeMounts" | deepCopy) }}
backoffLimit: {{ int .values.backoffLimit }}
{{- if .many }}
completionMode: Indexed
completions: {{ int .values.hosts }}
parallelism: {{ int .values.hosts }}
successPolicy: {rules: [{succeededIndexes: "0"}]}
{{- end }}
podReplacementPolicy: Failed
podFailurePolicy:
  rules:
    - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}  # preempted, drained
    - {action: FailJob, onExitCodes: {containerName: check, operator: In, values: [2]}}  # another Pod would fail as well
template:
  metadata: {{- include "volley.podMetadata" . | nindent 4 }}
  spec:
    {{- include "volley.pod" . | nindent 4 }}
    restartPolicy: Never
    terminationGracePeriodSeconds: {{ add (include "volley.grace" $root) 5 }}  # the report ends before the trainer
    initContainers:
      - name: check  # ends with an error that names the key if the configuration is wrong
        command: {{ include "volley.command" (dict "root" $root "start" (list "volley" "config" "show" "--set")) }}
        env: {{ toJson $env }}
        {{- include "volley.container" (dict "root" $root "values" $root.Values.report "image" "base" "mounts" $mounts) | nindent 8 }}
      {{- if $root.Values.dashboard.enabled }}
      - name: dashboard
        restartPolicy: Always
        command: [volley, dashboard, /runs, --trust, --host, 0.0.0.0, --port, "8100"]
        ports: [{name: dashboard, containerPort: 8100}]
        livenessProbe: {httpGet: {path: /, port: dashboard}, periodSeconds: 10, timeoutSeconds: 6, failureThreshold: 6}
        {{- include "volley.container" (dict "root" $root "values" $root.Values.dashboard "image" "base" "mounts" $mounts) | nindent 8 }}
      {{- end }}
      - name: trainer
        restartPolicy: Always
        {{- if .many }}
        command:
          - sh
          - -c
          - |
            process=$((JOB_INDEX * {{ int .values.hosts }} + JOB_COMPLETION_INDEX))
            if [ $process = 0 ]; then at=$POD_IP; else at={{ include "volley.name" $root }}-trainer; fi
            exec python -m services.trainer {{ include "volley.options" $root }} \
              services.trainer.process_id=$process services.trainer.coordinator_address=$at:8105
        {{- else }}
        command: {{ include "volley.command" (dict "root" $root "start" (list "python" "-m" "services.trainer")) }}
        {{- end }}
        {{- include "volley.service" (dict "values" $trainer "port" .port) | nindent 8 }}
        {{- include "volley.container" (dict "root" $root "values" $trainer "image" "trainer" "mounts" $mounts) | nindent 8 }}
    containers:
      - name: report
        {{- if .many }}
        command:
          - sh
          - -c
          - |
            if [ "$JOB_INDEX-$JOB_COMPLETION_INDEX" = 0-0 ]; then exec volley follow {{ include "volley.options" $root }}; fi
            trap 'exit 143' TERM
            sleep infinity & wait
        {{- else }}
        command: {{ include "volley.command" (dict "root" $root "start" (list "volley" "follow")) }}
        {{- end }}
        env: {{ toJson $env }}
        {{- include "volley.container" (dict "root" $root "values" $root.Values.report "image" "base" "mounts" $mounts) | nindent 8 }}
    volumes:
      {{- include "volley.commonVolumes" . | nindent 6 }}
      {{- if eq $storage.kind "bucket" }}
      - {name: runs, emptyDir: {sizeLimit: {{ $storage.size | quote }}}}
      {{- else }}
      - {name: runs, persistentVolumeClaim: {claimName: {{ $storage.claim | default (printf "%s-trainer" (include "volley.name" $root)) | quote }}}}
      {{- end }}
{{- end }}
